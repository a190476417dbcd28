"""The step plan: who computes which part of which sequence, for one global batch.

A plan is columnar: one row per piece, in parallel numpy arrays, never an object per sequence, so that 100,000 sequences
on 16,384 ranks are routine. Rows are kept in canonical order (rank, micro-batch, sequence, token_begin), which makes
equal plans byte-for-byte equal and lets every consumer slice a rank or a micro-batch without searching.

Vocabulary: a *sequence* of s tokens is served by `cp_degree` ranks; the part on one rank is a *piece*; the pieces a
rank runs together are a *micro-batch*, numbered from 0 in that rank's own order of execution. Which tokens a piece
holds follows from (s, cp_degree, cp_index) alone in the `zigzag` layout (`plan.zigzag`); in the `blocks` layout
the plan states `token_begin` and `token_end` instead. In the `chunks` layout it states all four: tokens
[token_begin, token_end) are a *chunk* of the sequence, and the piece is number cp_index of cp_degree of that chunk;
the chunks of a sequence are consecutive micro-batches of the same ranks, which keep the keys and values of the earlier
ones. `bytescale.plan.validate` proves a plan, `bytescale.plan.file` stores it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from bytescale.arrays import FloatArray, IntArray

Layout = Literal["zigzag", "blocks", "chunks"]


def _ints(values: Sequence[int] | IntArray) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parallel columns, one row a piece; all of shape [num_pieces].

    `cp_degree` and `cp_index` are set in the zig-zag layout, `token_begin` and `token_end` (half-open token indices
    inside the sequence) in the block layout, the other pair is None; the chunk layout has both.
    """

    sequence: IntArray
    rank: IntArray
    micro_batch: IntArray
    tokens: IntArray
    offload_ratio: FloatArray
    cp_degree: IntArray | None = None
    cp_index: IntArray | None = None
    token_begin: IntArray | None = None
    token_end: IntArray | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and all(
            np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def take(self, rows: IntArray) -> "Pieces":
        """The pieces at `rows`, in that order."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {name: None if column is None else column[rows] for name, column in columns.items()}
        return Pieces(**taken)


@dataclass(frozen=True)
class Prediction:
    """What the cost model predicts for a plan.

    Attributes:
        step_time_s: makespan of the step, waiting for gang members included.
        lower_bound_s: max(total degree-1 compute / hdp_size, least time of the most expensive sequence at any degree).
        rank_time_s: compute plus exposed communication of each rank, waiting excluded. Shape [hdp_size].
        imbalance: maximum of `rank_time_s` over its mean; idle ranks count as 0.
        planning_time_s: wall time that making the plan took.
    """

    step_time_s: float
    lower_bound_s: float
    rank_time_s: FloatArray
    imbalance: float
    planning_time_s: float


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One global batch, placed. Make it with `step_plan`, which orders the rows.

    Attributes:
        strategy: name of the algorithm that made it.
        hdp_size: number of HDP ranks (with a pipeline: of pipelines).
        pp_size: pipeline stages.
        tokens_per_rank: capacity C, in tokens held per micro-batch without offloading.
        num_layers: layers on one rank, ceil(layers / pp_size).
        lengths: tokens of every sequence of the batch. Shape [num_sequences].
        pieces: the rows, in canonical order.
        kept_gradient_share: what the key-and-value gradients of a kept chunk add to its activations, as a share of
            them; 0 outside the `chunks` layout.
        predicted: what the cost model predicts; None until it has been asked.
        origin: the strategy whose plan this is, where `strategy` is a search that returned another one's; not stored.
    """

    strategy: str
    hdp_size: int
    tokens_per_rank: int
    num_layers: int
    lengths: IntArray
    pieces: Pieces
    pp_size: int = 1
    layout: Layout = "zigzag"
    kept_gradient_share: float = 0.0
    predicted: Prediction | None = field(default=None, compare=False)
    origin: str = field(default="", compare=False)

    def __eq__(self, other: object) -> bool:
        """Equal in all but the prediction."""
        compared = [f.name for f in fields(self) if f.compare]
        return isinstance(other, StepPlan) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in compared
        )

    def __str__(self) -> str:
        """One line a rank, as in `bytescale.plan.text`; large plans are shortened."""
        from bytescale.plan.text import MAX_SHOWN, plan_to_text

        return plan_to_text(self, most=MAX_SHOWN)

    def __repr__(self) -> str:
        return (
            f"<StepPlan {self.strategy}: {self.num_sequences} sequences, {self.num_tokens} tokens, "
            f"{len(self.pieces)} pieces on {self.hdp_size} ranks>"
        )

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def num_micro_batches(self) -> IntArray:
        """Micro-batches of every rank. Shape [hdp_size]; idle ranks have 0."""
        counts = np.zeros(self.hdp_size, dtype=np.int64)
        np.maximum.at(counts, self.pieces.rank, self.pieces.micro_batch + 1)
        return counts

    def sequence_degrees(self) -> IntArray:
        """`cp_degree` of every sequence; in the block layout the number of distinct ranks. Shape [num_sequences]."""
        if self.pieces.cp_degree is not None:
            degrees = np.zeros(self.num_sequences, dtype=np.int64)
            degrees[self.pieces.sequence] = self.pieces.cp_degree
            return degrees
        pairs = np.unique(self.pieces.sequence * self.hdp_size + self.pieces.rank)
        return np.bincount(pairs // self.hdp_size, minlength=self.num_sequences)

    def sequence_chunks(self) -> IntArray:
        """Number of chunks of every sequence, 1 outside the `chunks` layout. Shape [num_sequences]."""
        if self.layout != "chunks":
            return np.ones(self.num_sequences, dtype=np.int64)
        assert self.pieces.cp_index is not None
        return np.bincount(self.pieces.sequence[self.pieces.cp_index == 0], minlength=self.num_sequences)

    def chunk_bounds(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """First and end token, inside its sequence, of the chunk or whole sequence that each of `rows` is cut from."""
        pieces = self.pieces
        if pieces.token_begin is None or pieces.token_end is None or self.layout != "chunks":
            return np.zeros(len(rows), dtype=np.int64), self.lengths[pieces.sequence[rows]]
        return pieces.token_begin[rows], pieces.token_end[rows]

    def sequence_rows(self) -> tuple[IntArray, IntArray]:
        """Rows grouped by sequence: `rows[begin[i]:begin[i+1]]` are those of sequence i.

        They are ordered by token_begin, inside a chunk by cp_index.
        """
        inner = [column for column in (self.pieces.cp_index, self.pieces.token_begin) if column is not None]
        rows = np.lexsort((*inner, self.pieces.sequence))
        begin = np.searchsorted(self.pieces.sequence[rows], np.arange(self.num_sequences + 1))
        return rows, begin

    def micro_batch_rows(self, rank: int) -> Iterator[IntArray]:
        """Row numbers of each micro-batch of `rank`, in order of execution; inside one, ascending `sequence`."""
        low, high = np.searchsorted(self.pieces.rank, [rank, rank + 1])
        bounds = low + np.searchsorted(self.pieces.micro_batch[low:high], np.arange(self.num_micro_batches()[rank] + 1))
        for begin, end in pairwise(bounds):
            yield np.arange(begin, end, dtype=np.int64)

    def micro_batch_ids(self) -> IntArray:
        """A dense global number 0..M-1 of the micro-batch of each row, ascending by (rank, micro-batch)."""
        offsets = np.concatenate([[0], np.cumsum(self.num_micro_batches())[:-1]])
        return offsets[self.pieces.rank] + self.pieces.micro_batch


def step_plan(
    *,
    strategy: str,
    hdp_size: int,
    tokens_per_rank: int,
    num_layers: int,
    lengths: Sequence[int] | IntArray,
    sequence: Sequence[int] | IntArray,
    rank: Sequence[int] | IntArray,
    micro_batch: Sequence[int] | IntArray,
    tokens: Sequence[int] | IntArray,
    offload_ratio: Sequence[float] | FloatArray | float = 0.0,
    cp_degree: Sequence[int] | IntArray | None = None,
    cp_index: Sequence[int] | IntArray | None = None,
    token_begin: Sequence[int] | IntArray | None = None,
    token_end: Sequence[int] | IntArray | None = None,
    pp_size: int = 1,
    kept_gradient_share: float = 0.0,
    predicted: Prediction | None = None,
) -> StepPlan:
    """A `StepPlan` from columns in any order; the layout follows from which pair of columns is given, or both.

    Raises:
        ValueError: neither (cp_degree, cp_index) nor (token_begin, token_end) are given, or the columns differ in
            length.
    """
    rings = cp_degree is not None and cp_index is not None
    blocks = token_begin is not None and token_end is not None
    if not (rings or blocks):
        raise ValueError("a plan needs cp_degree and cp_index, token_begin and token_end, or all four")
    layout: Layout = "zigzag" if not blocks else "chunks" if rings else "blocks"
    num_pieces = len(sequence)
    ratio = np.ascontiguousarray(offload_ratio, dtype=np.float64)
    if np.ndim(offload_ratio) == 0:
        ratio = np.full(num_pieces, offload_ratio, dtype=np.float64)
    pieces = Pieces(
        sequence=_ints(sequence),
        rank=_ints(rank),
        micro_batch=_ints(micro_batch),
        tokens=_ints(tokens),
        offload_ratio=ratio,
        cp_degree=None if cp_degree is None else _ints(cp_degree),
        cp_index=None if cp_index is None else _ints(cp_index),
        token_begin=None if token_begin is None else _ints(token_begin),
        token_end=None if token_end is None else _ints(token_end),
    )
    for f in fields(pieces):
        column = getattr(pieces, f.name)
        if column is not None and len(column) != num_pieces:
            raise ValueError(f"column {f.name} has {len(column)} rows, column sequence has {num_pieces}")
    inner = pieces.token_begin if blocks else pieces.cp_index
    assert inner is not None
    order = np.lexsort((inner, pieces.sequence, pieces.micro_batch, pieces.rank))
    return StepPlan(
        strategy=strategy,
        hdp_size=hdp_size,
        tokens_per_rank=tokens_per_rank,
        num_layers=num_layers,
        lengths=_ints(lengths),
        pieces=pieces.take(order),
        pp_size=pp_size,
        layout=layout,
        kept_gradient_share=kept_gradient_share,
        predicted=predicted,
    )
