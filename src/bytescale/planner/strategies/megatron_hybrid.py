"""`megatron-hybrid`: hybrid context parallelism as Megatron-LM 0.19 ships it, its rules re-told for sets of ranks.

Need(s) is the next power of two of s / C, work is s^2 / D; linear layers and communication count for nothing.
Longest first, sequences are cut into as many buckets as there are distinct needs. A *round* is filled: the head of the
first bucket that can be placed opens a set of the lowest free ranks, or joins the least loaded set of exactly its size.
Once a smaller need than the round's first has been placed, the round closes as soon as the spread is within 5 %. Then
the last sequence of the busiest set is taken back while that narrows the spread, and while ranks are empty the smallest
set is doubled. Leftovers start the next round. Every sequence is a micro-batch of its own on all ranks of its set.

Differences, all in the peer's favour: no barrier between rounds; where it aborts we go on (a need above hdp_size is
hdp_size; a set that cannot double takes the ranks there are). With a pipeline, which the peer refuses, the degrees are
kept and the gangs stacked. Cost: O(N log N + N * sets / 1000), Python with numpy for the balance test.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bytescale.arrays import IntArray
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.rows import Placed, plan_of_units, spread
from bytescale.planner.problem import Problem, too_long

BALANCE_SLACK = 0.05
BUCKET_SLACK = 1.1


@dataclass
class RankSet:
    """Consecutive ranks that run the same sequences, while a round is being filled."""

    size: int
    load: float = 0.0
    sequences: list[int] = field(default_factory=list)


def plan_hybrid(problem: Problem) -> StepPlan:
    """Plan with the peer's rules.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    rounds = plan_rounds(problem.lengths, capacity, hdp_size)
    unit = np.zeros(problem.num_sequences, dtype=np.int64)
    sizes: list[int] = []
    firsts: list[int] = []
    for rank_sets in rounds:
        first = 0
        for rank_set in rank_sets:
            num = len(rank_set.sequences)
            unit[rank_set.sequences] = np.arange(len(sizes), len(sizes) + num)
            sizes += [rank_set.size] * num
            firsts += [first] * num
            first += rank_set.size
    degree = np.array(sizes, dtype=np.int64)
    if problem.pp_size == 1:
        placed = _one_after_another(np.array(firsts, dtype=np.int64), degree, hdp_size)
    else:
        work = np.zeros(problem.num_sequences)
        work[unit] = problem.lengths.astype(np.float64) ** 2
        placed = stack_gangs(degree, hdp_size, work / degree)
    return plan_of_units(
        problem, "megatron-hybrid", unit=unit, degree=degree, placed=placed, offload_ratio=problem.fixed_ratio
    )


def _one_after_another(first: IntArray, degree: IntArray, hdp_size: int) -> Placed:
    """Units from rank `first` on; the number of each is how many its rank has before it."""
    item, index = spread(degree)
    ranks = first[item] + index
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=hdp_size)
    number = np.zeros(len(ranks), dtype=np.int64)
    number[order] = spread(counts)[1]
    return Placed(ranks, number, counts)


def plan_rounds(lengths: IntArray, capacity: int, hdp_size: int) -> list[list[RankSet]]:
    """The rounds, each a list of rank sets from rank 0 upwards."""
    values = lengths.tolist()
    need = [min(hdp_size, 1 << max(0, (-(-s // capacity) - 1).bit_length())) for s in values]
    left = np.argsort(-lengths, kind="stable").tolist()
    rounds = []
    while left:
        rank_sets, left = _fill_round(left, values, need, hdp_size)
        rounds.append(rank_sets)
    return rounds


def _buckets(rows: list[int], values: list[int], need: list[int]) -> list[deque[int]]:
    """Consecutive pieces of about equal work, at most as many as there are distinct needs."""
    num = len({need[i] for i in rows})
    target = sum(values[i] ** 2 / need[i] for i in rows) / num
    buckets: list[deque[int]] = []
    current: deque[int] = deque()
    work = 0.0
    for position, i in enumerate(rows):
        cost = values[i] ** 2 / need[i]
        # The peer lowers the number of buckets still to come and also subtracts those made: kept as it is.
        runs_short = len(rows) - position <= num - 2 * len(buckets)
        if current and (work + cost > target * BUCKET_SLACK or runs_short):
            buckets.append(current)
            current, work = deque(), 0.0
        current.append(i)
        work += cost
    buckets.append(current)
    return buckets


def _fill_round(rows: list[int], values: list[int], need: list[int], hdp_size: int) -> tuple[list[RankSet], list[int]]:
    buckets = _buckets(rows, values, need)
    sets: list[RankSet] = []
    largest = 0.0
    by_size: dict[int, list[tuple[float, int]]] = {}
    free = hdp_size
    first_need: int | None = None
    may_close = False
    while buckets:
        bucket = next((b for b in buckets if b and (need[b[0]] in by_size or free >= need[b[0]])), None)
        if bucket is None:
            break
        i = bucket.popleft()
        size = need[i]
        first_need = size if first_need is None else first_need
        cost = values[i] ** 2 / size
        if free >= size:
            at = len(sets)
            sets.append(RankSet(size))
            free -= size
        else:
            at = heapq.heappop(by_size[size])[1]
        sets[at].sequences.append(i)
        sets[at].load += cost
        largest = max(largest, sets[at].load)
        heapq.heappush(by_size.setdefault(size, []), (sets[at].load, at))
        while buckets and not buckets[0]:
            buckets.pop(0)
        may_close |= size < first_need
        if may_close and buckets and not free and _balanced(largest, by_size):
            break
    left = [i for bucket in buckets for i in bucket]
    _trim(sets, left, values, free)
    _fill_empty(sets, values, free)
    return sets, left


def _balanced(largest: float, by_size: dict[int, list[tuple[float, int]]]) -> bool:
    """Every set is in the heap of its size, so the least load is at the head of a heap."""
    least = min(heap[0][0] for heap in by_size.values())
    return largest - least <= BALANCE_SLACK * largest


def _trim(sets: list[RankSet], left: list[int], values: list[int], free: int) -> None:
    """Take back the last sequence of the busiest set while that narrows the spread; not while ranks are empty."""
    if free:
        return
    loads = [rank_set.load for rank_set in sets]
    while True:
        largest, least = max(loads), min(loads)
        at = loads.index(largest)
        busiest = sets[at]
        if largest - least <= BALANCE_SLACK * largest or len(busiest.sequences) <= 1:
            return
        i = busiest.sequences[-1]
        loads[at] -= values[i] ** 2 / busiest.size
        if max(loads) - min(loads) >= largest - least:
            return
        busiest.sequences.pop()
        busiest.load = loads[at]
        left.append(i)


def _fill_empty(sets: list[RankSet], values: list[int], free: int) -> None:
    """Double the first of the smallest sets until no rank is empty. Its load then counts its first sequence alone."""
    smallest = [(s.size, at) for at, s in enumerate(sets)]
    heapq.heapify(smallest)
    while free:
        size, at = heapq.heappop(smallest)
        wider = min(2 * size, size + free)
        free -= wider - size
        sets[at].size = wider
        sets[at].load = values[sets[at].sequences[0]] ** 2 / wider
        heapq.heappush(smallest, (wider, at))
