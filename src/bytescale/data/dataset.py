"""The sequences of a corpus: which documents, cut where, in columns that a planner can read before any token is.

A sequence is the tokens of one document with its end token, and its begin token if the tokenizer has one, or a part of
them where a document is longer than `max_context` and `overlong` is `split`: then only the first part begins with it.
Invariants: every sequence has 1..max_context tokens, none spans two documents, order is that of the source; what was
left out is counted and never silent. A sequence of s tokens has s - 1 targets: its last token has no successor, even
where a document was cut.

Cost: 24 bytes of memory a sequence; tokens stay on disk until `read`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from bytescale.arrays import IntArray
from bytescale.config.data import DataConfig, Mix, Overlong
from bytescale.data.cache import TokenCorpus, open_corpus
from bytescale.data.documents.cuts import LineEnds, cut, line_ends
from bytescale.data.documents.held_out import is_held_out
from bytescale.data.encoding.encoder import make_encoder
from bytescale.data.reader import CorpusReader, TokenReader
from bytescale.data.sources.source import document_name, open_source
from bytescale.data.tokenizers import Tokenizer, load_tokenizer
from bytescale.errors import UserError, counted

Part = Literal["train", "validation"]
"""What a run trains on, and what `data.validation` keeps out of training."""


@dataclass(frozen=True, eq=False)
class SourceCorpus:
    """The tokenised documents of one source, and how much of the mixture they are to be.

    Attributes:
        corpus: the documents.
        name: of the source; empty for the only one.
        weight: relative to the other sources.
        epochs: most times to go through it; None has no bound.
        name_of: name of a document by number, for messages.
        ends: where its long documents may be cut; None is anywhere.
    """

    corpus: TokenCorpus
    name: str = ""
    weight: float = 1.0
    epochs: int | None = None
    name_of: Callable[[int], str] | None = None
    ends: LineEnds | None = None


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
        without_target: sequences left out because the source masks all their targets.
        skipped: documents that could not be read or encoded, and were left out as asked.
        other_part: documents that belong to the other part, held out of training or trained on.
    """

    documents: int
    empty_dropped: int
    overlong_split: int
    overlong_dropped: int
    sequences: int
    tokens: int
    without_target: int = 0
    skipped: int = 0
    other_part: int = 0

    def describe(self) -> str:
        """One line for a person."""
        documents, sequences = counted(self.documents, "document", ","), counted(self.sequences, "sequence", ",")
        line = f"{documents} -> {sequences}, {counted(self.tokens, 'token', ',')}"
        asides = [f"{count:,} {what}" for what, count in self.left_out().items()]
        return f"{line} ({', '.join(asides)})" if asides else line

    def left_out(self) -> dict[str, int]:
        """What became of documents besides being a sequence each, in words, where there are any."""
        counts = {
            "empty dropped": self.empty_dropped,
            "overlong split": self.overlong_split,
            "overlong dropped": self.overlong_dropped,
            "sequences without a target dropped": self.without_target,
            "bad documents skipped": self.skipped,
            "in the other part, see data.validation": self.other_part,
        }
        return {what: count for what, count in counts.items() if count}


@dataclass(frozen=True, eq=False)
class SourceSequences:
    """The sequences of one source: those from `begin` to `end` of the dataset.

    Attributes:
        name: of the source; empty for the only one.
        begin, end: first sequence, and one after the last.
        weight: its share of the mixture; the shares of all sources add up to 1.
        epochs: most times to go through it; None has no bound.
        counts: what became of its documents.
    """

    name: str
    begin: int
    end: int
    counts: DatasetCounts
    weight: float = 1.0
    epochs: int | None = None

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class SequenceDataset:
    """Sequences in the order of the sources, as columns of shape [num_sequences]; tokens stay with the reader.

    Attributes:
        lengths: tokens of each sequence.
        num_targets: targets of each sequence: length - 1, less those that the source masks.
        sources: which of them belong to which source.
        reader: gives their tokens.
        mix: what the weights of the sources are shares of.
        notes: lines for whoever started the run: what was left out or not read as asked.
    """

    lengths: IntArray
    num_targets: IntArray
    sources: tuple[SourceSequences, ...]
    reader: TokenReader
    mix: Mix = "tokens"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def counts(self) -> DatasetCounts:
        """What became of the documents of all sources."""
        columns = zip(*(astuple(source.counts) for source in self.sources), strict=True)
        return DatasetCounts(*map(sum, columns))

    def describe(self) -> tuple[str, ...]:
        """A line for a person, and one a source where there are several."""
        several = self.sources if len(self.sources) > 1 else ()
        shares = (f"source {s.name}: {s.weight:.1%} of the {self.mix}; {s.counts.describe()}" for s in several)
        return (self.counts.describe(), *shares)

    def source_of(self, sequences: IntArray) -> IntArray:
        """Number of the source of each sequence. Shape [len(sequences)]."""
        begins = [source.begin for source in self.sources]
        return np.searchsorted(begins, sequences, side="right") - 1

    def amounts(self, sequences: IntArray) -> IntArray:
        """How much each sequence adds to what its source gave, in tokens or sequences as `mix` says."""
        return self.lengths[sequences] if self.mix == "tokens" else np.ones_like(sequences)

    def given(self, sequences: IntArray) -> dict[str, tuple[int, int]]:
        """How many of `sequences`, and of their tokens, each source gave, by its name."""
        source_of, lengths = self.source_of(sequences), self.lengths[sequences]
        return {
            source.name: (int((source_of == number).sum()), int(lengths[source_of == number].sum()))
            for number, source in enumerate(self.sources)
        }

    def read(self, sequence: int, begin: int, end: int) -> IntArray:
        """Tokens begin..end-1 of `sequence`. Shape [end - begin].

        Raises:
            IndexError: the sequence does not have these tokens.
        """
        if not (0 <= sequence < len(self) and 0 <= begin <= end <= self.lengths[sequence]):
            raise IndexError(f"no tokens [{begin}, {end}) in sequence {sequence}")
        return self.reader.read_runs(np.array([sequence]), np.array([begin]), np.array([end]))[0]


def build_dataset(
    corpora: TokenCorpus | Sequence[SourceCorpus],
    max_context: int,
    overlong: Overlong = "split",
    name_of: Callable[[int], str] | None = None,
    *,
    part: Part = "train",
    validation: float = 0.0,
    mix: Mix = "tokens",
) -> SequenceDataset:
    """Apply `max_context` to the documents of one corpus or of several.

    Args:
        corpora: documents, and how much of the mixture they are.
        max_context: longest sequence, in tokens, end token included.
        overlong: `split` cuts longer documents every `max_context` tokens, `drop` leaves them out, `error` refuses.
        name_of: name of a document by number, for the message of `error`, where there is one corpus.
        part: which of the documents, see `open_dataset`.
        validation: share of the documents that is held out of training.
        mix: what weights are shares of.

    Raises:
        UserError: a document is too long and `overlong` is `error`, or no sequence has a target.
    """
    if isinstance(corpora, TokenCorpus):
        corpora = [SourceCorpus(corpora, name_of=name_of)]
    if part == "validation" and len(corpora) > 1:
        # A small source may have no document there.
        corpora = [source for source in corpora if is_held_out(source.corpus.digests, validation).any()] or corpora
    cuts, counts = [], []
    for source in corpora:
        with in_words_of(source.name):
            parts, count = _sequences(source, max_context, overlong, part, validation)
        cuts.append(parts)
        counts.append(count)
    starts, lengths, num_targets = (np.concatenate(columns) for columns in zip(*cuts, strict=True))
    ends = np.cumsum([count.sequences for count in counts]).tolist()
    begins = [0, *ends[:-1]]
    total_weight = sum(source.weight for source in corpora)
    sources = tuple(
        SourceSequences(source.name, begin, end, count, source.weight / total_weight, source.epochs)
        for source, begin, end, count in zip(corpora, begins, ends, counts, strict=True)
    )
    reader = CorpusReader([source.corpus for source in corpora], starts, lengths, begins)
    return SequenceDataset(lengths, num_targets, sources, reader, mix)


def open_dataset(config: DataConfig, tokenizer: Tokenizer | None = None, part: Part = "train") -> SequenceDataset:
    """The sequences that a configuration describes: sources, tokenizer, cache and limits in one call.

    With `data.validation` above 0 the documents are in two parts that share no content: `open_dataset(config.data,
    tokenizer)` is what a run trains on, `open_dataset(config.data, tokenizer, "validation")` what it measures itself
    by, once through. Both read the same cache entry, so the second costs no tokenising.

    Args:
        config: the `[data]` section.
        tokenizer: what `load_tokenizer(config)` returned, where the caller has it already.
        part: `train`, or `validation` for the documents that `data.validation` keeps out of training.

    Raises:
        UserError: anything about the data that the user can put right; the message says how.
    """
    tokenizer = tokenizer or load_tokenizer(config)
    corpora, notes = [], list(tokenizer.notes)
    ends = line_ends(tokenizer, config.split_at) if config.overlong == "split" else None
    for source_config in config.named_sources:
        if source_config.weight == 0:
            continue
        with in_words_of(source_config.name or ""):
            source = open_source(source_config)
            encoder = make_encoder(source_config, tokenizer, config.on_error)
            corpus = open_corpus(source, encoder, config.cache_dir, num_workers=config.workers)
        if source.left_out:
            notes.append(f"left out under {source.root}: {source.left_out}")
        notes += [note for note in corpus.notes if note not in notes]
        corpora.append(
            SourceCorpus(
                corpus,
                source_config.name or "",
                source_config.weight,
                1 if part == "validation" else source_config.epochs,
                partial(document_name, source),
                None if encoder.gives_ids else ends,
            )
        )
    dataset = build_dataset(
        corpora, config.max_context, config.overlong, part=part, validation=config.validation, mix=config.mix
    )
    return replace(dataset, notes=tuple(notes))


@contextmanager
def in_words_of(name: str) -> Iterator[None]:
    """Let complaints inside the block name the source, where it has a name."""
    try:
        yield
    except UserError as error:
        raise (UserError(f"source {name}: {error}") if name else error) from error.__cause__


def _sequences(
    source: SourceCorpus, max_context: int, overlong: Overlong, part: Part, validation: float
) -> tuple[tuple[IntArray, IntArray, IntArray], DatasetCounts]:
    """Start, length and number of targets of each sequence of one source, and what became of its documents."""
    corpus = source.corpus
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
        name = source.name_of(first) if source.name_of is not None else str(first)
        raise UserError(
            f"document {name} has {lengths[first]} tokens with its end token, data.max_context is {max_context}; raise "
            "data.max_context or set data.overlong to split or drop"
        )
    kept = np.flatnonzero(ours & ~empty & ~long if overlong == "drop" else ours & ~empty)
    starts, lengths = cut(np.asarray(corpus.offsets)[kept], lengths[kept], max_context, corpus.tokens, source.ends)
    starts, lengths, num_targets, without_target = _with_targets(corpus, starts, lengths)
    counts = DatasetCounts(
        documents=int(ours.sum()),
        empty_dropped=int(empty.sum()),
        overlong_split=int(long.sum()) if overlong == "split" else 0,
        overlong_dropped=int(long.sum()) if overlong == "drop" else 0,
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        without_target=without_target,
        skipped=corpus.num_skipped,
        other_part=corpus.num_documents - int(ours.sum()),
    )
    if not (num_targets > 0).any():
        raise UserError(f"no sequence has a token to predict: {counts.describe()}; check data.path and data.overlong")
    return (starts, lengths, num_targets), counts


def _with_targets(corpus: TokenCorpus, starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray, IntArray, int]:
    """The sequences that the source leaves a target, how many it leaves each, and how many sequences it leaves none."""
    if corpus.mask is None:
        return starts, lengths, lengths - 1, 0
    num_targets = np.zeros_like(lengths)
    several = np.flatnonzero(lengths > 1)
    if len(several):
        begins, ends = starts[several] + 1, starts[several] + lengths[several]
        # Sums of the mask over [begin, end) of each sequence; the end of the data is the end of the last sum.
        bounds = np.stack([begins, ends], axis=1).ravel()
        bounds = bounds[:-1] if bounds[-1] == len(corpus.mask) else bounds
        num_targets[several] = np.add.reduceat(corpus.mask, bounds, dtype=np.int64)[::2]
    kept = num_targets > 0
    return starts[kept], lengths[kept], num_targets[kept], int((~kept).sum())
