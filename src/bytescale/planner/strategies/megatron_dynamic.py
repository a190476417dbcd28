"""`megatron-dynamic`: dynamic context parallelism as the development branch of Megatron-LM plans it by default.

All ranks run the same number of micro-batches. Each is filled greedily, longest sequence first; work is s^2 / D a rank,
linear layers and communication count for nothing. The longest, of length t, opens a set of the fewest ranks (a power of
two) and caps the work of every rank at 1.05 * t * C. Each further sequence may join a set of any power of two from its
own need upwards that holds at most C tokens a rank with it, or open one on the next free ranks; it takes what raises
the largest work least, of equals the narrowest and earliest set, a new one last. What cap or memory refuse waits for a
later micro-batch. Then the first of the smallest sets is doubled until no rank is empty; where that cannot be, because
ranks are no power of two, the micro-batch is filled again with one set of all ranks.

Where we differ, in the peer's favour: it counts s / D tokens and pads; what whole tokens push over C follows in
micro-batches at the end. Where it aborts (a need above the ranks that hold the sequence, a doubling past the last rank)
we take all ranks.

Cost: O(sequences * micro-batches * log R) steps of Python, numpy over the sets of one size where a sequence is placed.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.packing import next_fit
from bytescale.planner.parts.rows import Placed, plan_of_units
from bytescale.planner.problem import Problem, too_long

CAP_SLACK = 1.05


@dataclass(frozen=True)
class RankSet:
    """The next `size` ranks, and the sequences that they run together in one micro-batch."""

    size: int
    sequences: list[int]


def plan_dynamic(problem: Problem) -> StepPlan:
    """Plan with the peer's rules.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    micro_batches = plan_micro_batches(problem.lengths, capacity, hdp_size)
    sets = [rank_set for sets in micro_batches for rank_set in sets]
    degree = np.array([rank_set.size for rank_set in sets], dtype=np.int64)
    unit = np.zeros(problem.num_sequences, dtype=np.int64)
    late_degree: list[int] = []
    for number, rank_set in enumerate(sets):
        unit[rank_set.sequences] = number
        pieces = -(-problem.lengths[rank_set.sequences] // rank_set.size)
        if pieces.sum() > capacity:
            pack = next_fit(pieces, capacity)
            for p in range(1, int(pack.max()) + 1):
                unit[np.array(rank_set.sequences)[pack == p]] = len(sets) + len(late_degree)
                late_degree.append(rank_set.size)
    # Sets fill all ranks of a micro-batch, one behind the other.
    slot = np.arange(int(degree.sum()))
    late_units = stack_gangs(np.array(late_degree, dtype=np.int64), hdp_size)
    return plan_of_units(
        problem,
        "megatron-dynamic",
        unit=unit,
        degree=np.append(degree, np.array(late_degree, np.int64)),
        placed=Placed(
            np.append(slot % hdp_size, late_units.ranks),
            np.append(slot // hdp_size, late_units.micro_batches + len(micro_batches)),
            late_units.counts + len(micro_batches),
        ),
        offload_ratio=problem.fixed_ratio,
    )


def plan_micro_batches(lengths: IntArray, capacity: int, hdp_size: int) -> list[list[RankSet]]:
    """The sets of every micro-batch, from rank 0 upwards; together they have all ranks."""
    order = np.argsort(-lengths, kind="stable")
    values: list[int] = lengths.tolist()
    left: list[int] = order.tolist()
    micro_batches = []
    while left:
        sets, rest = _fill(left, values, capacity, hdp_size)
        if not _widen(sets, hdp_size):
            sets, rest = _one_set(left, values, capacity, hdp_size)
        micro_batches.append(sets)
        left = rest
    return micro_batches


@dataclass
class _SetsOfSize:
    """The sets of one size while a micro-batch is filled, in the order they were opened.

    Attributes:
        at: position of each among all sets of the micro-batch.
        work, tokens: of each of their ranks; the first `len(at)` entries count.
        most_room: no set has more room than this.
        least_work: no set has less work than this.
    """

    work: FloatArray
    tokens: FloatArray
    at: list[int] = field(default_factory=list)
    most_room: float = 0.0
    least_work: float = 0.0

    def refresh(self, capacity: int) -> None:
        num = len(self.at)
        self.most_room = capacity - float(self.tokens[:num].min())
        self.least_work = float(self.work[:num].min())


def _need(length: int, capacity: int, hdp_size: int) -> int:
    """The fewest ranks, as a power of two, or all where that is more."""
    return min(hdp_size, 1 << max(0, (-(-length // capacity) - 1).bit_length()))


def _fill(rows: list[int], values: list[int], capacity: int, hdp_size: int) -> tuple[list[RankSet], list[int]]:
    """The sets of one micro-batch before they are widened, and the sequences that are left, longest first."""
    cap = float(values[rows[0]]) * float(capacity) * CAP_SLACK
    sets: list[RankSet] = []
    by_size: dict[int, _SetsOfSize] = {}
    left: list[int] = []
    free, most = hdp_size, 0.0
    for i in rows:
        s = values[i]
        size = _need(s, capacity, hdp_size)
        best_work, best_size, best_at = cap, 0, -1
        found = False
        while size <= hdp_size:
            work, tokens = s * s / size, s / size
            same = by_size.get(size)
            if same is not None and tokens <= same.most_room and same.least_work + work <= cap:
                num = len(same.at)
                projected = np.maximum(same.work[:num] + work, most)
                projected[same.tokens[:num] + tokens > capacity] = np.inf
                k = int(projected.argmin())
                if projected[k] <= cap and (not found or projected[k] < best_work):
                    found, best_work, best_size, best_at = True, float(projected[k]), size, k
            if free >= size and max(most, work) <= cap and (not found or max(most, work) < best_work):
                found, best_work, best_size, best_at = True, max(most, work), size, -1
            if not sets or (found and best_work == most):
                break  # the first takes its need; nothing wider is better than raising nothing
            size *= 2
        if not sets:
            found, best_size, best_at = True, size, -1
        if not found:
            left.append(i)
            continue
        work, tokens = s * s / best_size, s / best_size
        same = by_size.get(best_size)
        if same is None:
            most_sets = hdp_size // best_size
            same = by_size[best_size] = _SetsOfSize(np.zeros(most_sets), np.zeros(most_sets))
        if best_at < 0:
            best_at = len(same.at)
            same.at.append(len(sets))
            sets.append(RankSet(best_size, []))
            free -= best_size
        sets[same.at[best_at]].sequences.append(i)
        same.work[best_at] += work
        same.tokens[best_at] += tokens
        same.refresh(capacity)
        most = max(most, float(same.work[best_at]))
    return sets, left


def _widen(sets: list[RankSet], hdp_size: int) -> bool:
    """Double the first of the smallest sets until no rank is empty; false where the empty ranks do not suffice."""
    empty = hdp_size - sum(rank_set.size for rank_set in sets)
    smallest = [(rank_set.size, at) for at, rank_set in enumerate(sets)]
    heapq.heapify(smallest)
    while empty:
        size, at = heapq.heappop(smallest)
        wider = min(2 * size, hdp_size)
        empty -= wider - size
        if empty < 0:
            return False
        sets[at] = RankSet(wider, sets[at].sequences)
        heapq.heappush(smallest, (wider, at))
    return True


def _one_set(rows: list[int], values: list[int], capacity: int, hdp_size: int) -> tuple[list[RankSet], list[int]]:
    """All ranks in one set, filled longest first with what fits, and what does not."""
    chosen, left, tokens = [], [], 0.0
    for i in rows:
        share = values[i] / hdp_size
        if tokens + share <= capacity:
            chosen.append(i)
            tokens += share
        else:
            left.append(i)
    return [RankSet(hdp_size, chosen)], left
