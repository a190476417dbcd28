"""What a run would see of its data: counts, lengths and shares by source, and sequences in words.

Nothing is trained and no rank is needed: batches are drawn by their metadata, as the run will draw them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bytescale.config.schema import BatchConfig
from bytescale.data.batches import next_batch
from bytescale.data.dataset import SequenceDataset, SourceSequences
from bytescale.data.mixture.order import SequenceOrder
from bytescale.data.mixture.state import LoaderState
from bytescale.data.tokenizers import Tokenizer
from bytescale.errors import UserError

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class SourcePreview:
    """One source.

    Attributes:
        name: of the source.
        documents, sequences, tokens, targets: how much it holds.
        lengths: shortest, quantiles, mean and longest of its sequences, in tokens.
        weight: share that it is to have.
        share: share that it has in the batches that were drawn.
        epochs: how often these batches go through it.
        left_out: what became of the documents that are not trained on.
    """

    name: str
    documents: int
    sequences: int
    tokens: int
    targets: int
    lengths: dict[str, float]
    weight: float
    share: float
    epochs: float
    left_out: dict[str, int]


@dataclass(frozen=True)
class Preview:
    """The data of a run.

    Attributes:
        sources: one entry a source.
        batches: how many batches were drawn.
        first_sequence: what the first batch begins with.
    """

    sources: tuple[SourcePreview, ...]
    batches: int
    first_sequence: int


def preview(dataset: SequenceDataset, batch_config: BatchConfig, seed: int, num_batches: int) -> Preview:
    """Draw `num_batches` batches, or what there is, and say what was in them."""
    state, order = LoaderState().of(dataset), SequenceOrder(dataset, seed)
    first, drawn = 0, 0
    for number in range(num_batches):
        batch, state = next_batch(dataset, batch_config, seed, state, order)
        if len(batch) == 0:
            break
        first, drawn = int(batch.sequence_ids[0]) if number == 0 else first, number + 1
    total = sum(source.drawn for source in state.sources)
    sources = []
    for source, end in zip(dataset.sources, state.sources, strict=True):
        epochs = end.epoch + end.position / len(source)
        sources.append(_of_source(dataset, source, end.drawn / max(1, total), epochs))
    return Preview(tuple(sources), drawn, first)


def _of_source(dataset: SequenceDataset, source: SourceSequences, share: float, epochs: float) -> SourcePreview:
    lengths = dataset.lengths[source.begin : source.end]
    quantiles = zip(QUANTILES, np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf"), strict=True)
    counts = source.counts
    return SourcePreview(
        name=source.name or "data",
        documents=counts.documents,
        sequences=len(source),
        tokens=int(lengths.sum()),
        targets=int(dataset.num_targets[source.begin : source.end].sum()),
        lengths={
            "min": int(lengths.min()),
            **{name: int(value) for name, value in quantiles},
            "mean": round(float(lengths.mean()), 1),
            "max": int(lengths.max()),
        },
        weight=source.weight,
        share=share,
        epochs=epochs,
        left_out=counts.left_out(),
    )


def decoded(dataset: SequenceDataset, tokenizer: Tokenizer, sequence: int, num_tokens: int) -> dict[str, Any]:
    """The first `num_tokens` tokens of a sequence in words.

    Returns:
        its number, source, length and targets, `ids`, `is_target` (0 or 1 for each id), and `parts`: its text in runs
        of tokens that are targets or are not.

    Raises:
        UserError: there is no such sequence.
    """
    if not 0 <= sequence < len(dataset):
        raise UserError(f"there is no sequence {sequence}; the data has {len(dataset):,}, counted from 0")
    end = min(num_tokens, int(dataset.lengths[sequence]))
    ids, labels = dataset.reader.read_runs(np.array([sequence]), np.array([0]), np.array([end]))
    # The label of a token is its successor: a token is a target where the one before it has a label.
    is_target = np.concatenate([[False], labels[:-1] >= 0])
    bounds = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), end]
    parts = [
        {"text": tokenizer.decode(ids[begin:stop].tolist()), "is_target": bool(is_target[begin])}
        for begin, stop in pairwise(bounds)
        if stop > begin
    ]
    return {
        "sequence": sequence,
        "source": dataset.sources[int(dataset.source_of(np.array([sequence]))[0])].name or "data",
        "length": int(dataset.lengths[sequence]),
        "targets": int(dataset.num_targets[sequence]),
        "ids": ids.tolist(),
        "is_target": is_target.astype(int).tolist(),
        "parts": parts,
    }
