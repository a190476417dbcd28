"""What one rank does in a step: its micro-batches, each with its pieces and the other pieces of their sequences.

A value cut out of a plan once, from which loader, attention, offloading and trace all read. Cost: the rows of the plan
are grouped by sequence once; then a few numpy slices a piece of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.step_plan import StepPlan


@dataclass(frozen=True, eq=False)
class MicroBatchShare:
    """One micro-batch of one rank.

    Attributes:
        plan: the plan it is part of.
        number: in the rank's order of execution.
        rows: rows of its pieces in `plan.pieces`, ascending sequence. Shape [num_pieces].
        sequence_rows: for each of them the rows of all pieces of its sequence, ordered by token_begin, cp_index.
    """

    plan: StepPlan
    number: int
    rows: IntArray
    sequence_rows: tuple[IntArray, ...]

    @property
    def sequences(self) -> IntArray:
        """Sequence of every piece. Shape [num_pieces]."""
        return self.plan.pieces.sequence[self.rows]

    @property
    def tokens(self) -> IntArray:
        """Tokens of every piece. Shape [num_pieces]."""
        return self.plan.pieces.tokens[self.rows]

    @property
    def offload_ratio(self) -> FloatArray:
        """Offload ratio of every piece. Shape [num_pieces]."""
        return self.plan.pieces.offload_ratio[self.rows]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def cp_degree(self) -> int:
        """Largest number of ranks that serve one of its sequences."""
        assert self.plan.pieces.cp_degree is not None, "block plans have no degree"
        return int(self.plan.pieces.cp_degree[self.rows].max())


@dataclass(frozen=True, eq=False)
class RankShare:
    """The micro-batches of one HDP rank, in order of execution; none on an idle rank."""

    plan: StepPlan
    rank: int
    micro_batches: tuple[MicroBatchShare, ...]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[MicroBatchShare]:
        return iter(self.micro_batches)


def rank_share(plan: StepPlan, rank: int) -> RankShare:
    """The share of `rank`, 0..hdp_size-1."""
    grouped, begin = plan.sequence_rows()

    def of(number: int, rows: IntArray) -> MicroBatchShare:
        sequences = plan.pieces.sequence[rows].tolist()
        return MicroBatchShare(plan, number, rows, tuple(grouped[begin[s] : begin[s + 1]] for s in sequences))

    return RankShare(plan, rank, tuple(of(number, rows) for number, rows in enumerate(plan.micro_batch_rows(rank))))
