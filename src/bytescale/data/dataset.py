"""The sequences of a corpus: which documents, cut where, in columns that a planner can read before any token is.

A sequence is the tokens of one document with its end token, and its begin token if the tokenizer has one, or a part of
them where a document is longer than `max_context` and `overlong` is `split`: then only the first part begins with it.
Invariants: every sequence has 1..max_context tokens, none spans two documents, order is that of the source; what was
left out is counted and never silent. A sequence of s tokens has s - 1 targets: its last token has no successor, even
where a document was cut.

Cost: 24 bytes of memory a sequence; tokens stay on disk until `read`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bytescale.arrays import IntArray, ceil_div, exclusive_sum
from bytescale.config.schema import DataConfig, Overlong
from bytescale.data.cache import TokenCorpus, open_corpus
from bytescale.data.held_out import is_held_out
from bytescale.data.sources import document_name, open_source
from bytescale.data.tokenizers import TokenArray, Tokenizer, load_tokenizer
from bytescale.errors import UserError, counted

Part = Literal["train", "validation"]
"""What a run trains on, and what `data.validation` keeps out of training."""


@dataclass(frozen=True)
class DatasetCounts:
    """What became of the documents.

    Attributes:
        documents: documents of this part of the source, empty ones included.
        empty_dropped: documents without a token of text.
        overlong_split: documents cut into several sequences.
        overlong_dropped: documents left out for their length.
        sequences: sequences that remain.
        tokens: tokens in them.
        other_part: documents that belong to the other part, held out of training or trained on.
    """

    documents: int
    empty_dropped: int
    overlong_split: int
    overlong_dropped: int
    sequences: int
    tokens: int
    other_part: int = 0

    def describe(self) -> str:
        """One line for a person."""
        documents, sequences = counted(self.documents, "document", ","), counted(self.sequences, "sequence", ",")
        line = f"{documents} -> {sequences}, {counted(self.tokens, 'token', ',')}"
        asides = [
            f"{count:,} {what}"
            for count, what in (
                (self.empty_dropped, "empty dropped"),
                (self.overlong_split, "overlong split"),
                (self.overlong_dropped, "overlong dropped"),
                (self.other_part, "in the other part, see data.validation"),
            )
            if count
        ]
        return f"{line} ({', '.join(asides)})" if asides else line


@dataclass(frozen=True, eq=False)
class SequenceDataset:
    """Sequences in source order, as columns of shape [num_sequences].

    Attributes:
        tokens: all tokens of the corpus; memory-mapped.
        lengths: tokens of each sequence.
        num_targets: targets of each sequence, length - 1.
        starts: where each sequence begins in `tokens`.
        counts: what became of the documents.
        notes: lines for whoever started the run: what was left out or not read as asked.
    """

    tokens: TokenArray
    lengths: IntArray
    num_targets: IntArray
    starts: IntArray
    counts: DatasetCounts
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, sequence: int, begin: int, end: int) -> IntArray:
        """Tokens begin..end-1 of `sequence`. Shape [end - begin].

        Raises:
            IndexError: the sequence does not have these tokens.
        """
        if not (0 <= sequence < len(self) and 0 <= begin <= end <= self.lengths[sequence]):
            raise IndexError(f"no tokens [{begin}, {end}) in sequence {sequence}")
        start = int(self.starts[sequence])
        return self.tokens[start + begin : start + end].astype(np.int64)


def build_dataset(
    corpus: TokenCorpus,
    max_context: int,
    overlong: Overlong = "split",
    name_of: Callable[[int], str] | None = None,
    *,
    part: Part = "train",
    validation: float = 0.0,
) -> SequenceDataset:
    """Apply `max_context` to the documents of `corpus`.

    Args:
        corpus: documents with their end tokens.
        max_context: longest sequence, in tokens, end token included.
        overlong: `split` cuts longer documents every `max_context` tokens, `drop` leaves them out, `error` refuses.
        name_of: name of a document by number, for the message of `error`.
        part: which of the documents, see `open_dataset`.
        validation: share of the documents that is held out of training.

    Raises:
        UserError: a document is too long and `overlong` is `error`, or no sequence has a target.
    """
    held_out = is_held_out(corpus.digests, validation)
    ours = held_out if part == "validation" else ~held_out
    if not ours.any():
        raise UserError(
            f"data.validation = {validation} of {counted(corpus.num_documents, 'document')} leaves none "
            f"{'for validation; raise it' if part == 'validation' else 'to train on; lower it'}"
        )
    lengths = np.diff(corpus.offsets).astype(np.int64)
    empty = ours & (lengths <= corpus.num_frame_tokens)
    long = ours & (lengths > max_context)
    if overlong == "error" and long.any():
        first = int(long.argmax())
        name = name_of(first) if name_of is not None else str(first)
        raise UserError(
            f"document {name} has {lengths[first]} tokens with its end token, data.max_context is {max_context}; raise "
            "data.max_context or set data.overlong to split or drop"
        )
    kept = np.flatnonzero(ours & ~empty & ~long if overlong == "drop" else ours & ~empty)
    starts, lengths = _cut(np.asarray(corpus.offsets)[kept], lengths[kept], max_context)
    counts = DatasetCounts(
        documents=int(ours.sum()),
        empty_dropped=int(empty.sum()),
        overlong_split=int(long.sum()) if overlong == "split" else 0,
        overlong_dropped=int(long.sum()) if overlong == "drop" else 0,
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        other_part=corpus.num_documents - int(ours.sum()),
    )
    if not (lengths > 1).any():
        raise UserError(f"no sequence has a token to predict: {counts.describe()}; check data.path and data.overlong")
    return SequenceDataset(
        tokens=corpus.tokens,
        lengths=lengths,
        num_targets=lengths - 1,
        starts=starts,
        counts=counts,
        notes=corpus.notes,
    )


def open_dataset(config: DataConfig, tokenizer: Tokenizer | None = None, part: Part = "train") -> SequenceDataset:
    """The sequences that a configuration describes: source, tokenizer, cache and limits in one call.

    With `data.validation` above 0 the documents are in two parts that share no content: `open_dataset(config.data,
    tokenizer)` is what a run trains on, `open_dataset(config.data, tokenizer, "validation")` what it measures itself
    by. Both read the same cache entry, so the second costs no tokenising.

    Args:
        config: the `[data]` section.
        tokenizer: what `load_tokenizer(config)` returned, where the caller has it already.
        part: `train`, or `validation` for the documents that `data.validation` keeps out of training.

    Raises:
        UserError: anything about the data that the user can put right; the message says how.
    """
    source = open_source(config)
    tokenizer = tokenizer or load_tokenizer(config)
    corpus = open_corpus(source, tokenizer, config.cache_dir)
    dataset = build_dataset(
        corpus,
        config.max_context,
        config.overlong,
        name_of=lambda document: document_name(source, document),
        part=part,
        validation=config.validation,
    )
    left_out = (f"left out under {source.root}: {source.left_out}",) if source.left_out else ()
    return replace(dataset, notes=(*left_out, *tokenizer.notes, *corpus.notes))


def _cut(starts: IntArray, lengths: IntArray, max_context: int) -> tuple[IntArray, IntArray]:
    """Cut every range (start, length) after each `max_context` tokens; returns the new starts and lengths."""
    num_parts = ceil_div(lengths, max_context)
    first = exclusive_sum(num_parts)
    offset = (np.arange(num_parts.sum(), dtype=np.int64) - np.repeat(first, num_parts)) * max_context
    remaining = np.repeat(lengths, num_parts) - offset
    return np.repeat(starts, num_parts) + offset, np.minimum(remaining, max_context)
