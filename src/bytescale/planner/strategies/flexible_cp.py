"""`flexible-cp`: best-fit packing into groups, then an integer degree for every group that minimises the slowest.

Longest first, a sequence joins the group with the least room that holds it, else opens one with the fewest ranks
that hold it (best-fit decreasing). Groups run in waves over all ranks, slowest groups first. The published system
chooses the degrees of a wave by dynamic programming over groups x ranks, minimising the slowest group; giving spare
ranks one by one to the slowest group reaches the same optimum, because a group's time falls with its degree, at
O(spare log groups). Every sequence of a group is cut over all its ranks.

In a wave slower groups take less loaded ranks. With a pipeline groups are stacked at equal micro-batch numbers.
Invariant: ceil(s / D) falls with D, so a group that fits at its least degree fits wider. Cost: O(n log n + pieces).
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import group_time_s
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.rows import Placed, plan_of_units, spread
from bytescale.planner.problem import Problem, too_long

_FIT_TRIES = 4
_LOOK_AHEAD = 8


@dataclass(frozen=True)
class Groups:
    """Packing result: group of each sequence, and the fewest ranks of each group."""

    group: IntArray
    degree: IntArray


def best_fit_groups(lengths: IntArray, capacity: int) -> Groups:
    """Best-fit decreasing: short sequences beside long ones; sum of ceil(s / D) <= capacity in a group of D ranks."""
    room: list[tuple[int, int]] = []  # tokens of room on all ranks together, group; ascending
    degree: list[int] = []
    free: list[int] = []  # tokens of room on the fullest rank
    group = np.zeros(len(lengths), dtype=np.int64)
    values = lengths.tolist()
    for i in np.argsort(-lengths, kind="stable").tolist():
        s = values[i]
        at = bisect_left(room, (s, -1))
        for k in range(at, min(at + _FIT_TRIES, len(room))):
            g = room[k][1]
            if -(-s // degree[g]) <= free[g]:
                room.pop(k)
                break
        else:
            g = len(degree)
            degree.append(-(-s // capacity))
            free.append(capacity)
        free[g] -= -(-s // degree[g])
        group[i] = g
        if free[g]:
            insort(room, (free[g] * degree[g], g))
    return Groups(group, np.array(degree, dtype=np.int64))


def plan_flexible(problem: Problem) -> StepPlan:
    """Pack, form waves, choose degrees, place.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    groups = best_fit_groups(problem.lengths, capacity)
    by_group = np.argsort(groups.group, kind="stable")
    begin = np.searchsorted(groups.group[by_group], np.arange(len(groups.degree) + 1))
    time_s = group_time_s(problem, problem.lengths, groups.group, groups.degree, problem.fixed_ratio)
    degree = groups.degree.copy()
    waves = _waves(degree, time_s, hdp_size)
    for wave in waves:
        _spend_spare_ranks(problem, wave, degree, time_s, by_group, begin)
    if problem.pp_size == 1:
        placed = _place_waves(waves, degree, time_s, hdp_size)
    else:
        placed = stack_gangs(degree, hdp_size, time_s)
    return plan_of_units(
        problem, "flexible-cp", unit=groups.group, degree=degree, placed=placed, offload_ratio=problem.fixed_ratio
    )


def _waves(degree: IntArray, time_s: FloatArray, hdp_size: int) -> list[IntArray]:
    """Groups, slowest first, cut where the ranks of a wave are used up."""
    order = np.argsort(-time_s, kind="stable")
    end = np.cumsum(degree[order])
    waves, first = [], 0
    while first < len(order):
        base = end[first] - degree[order[first]]
        last = int(np.searchsorted(end, base + hdp_size, side="right"))
        waves.append(order[first:last])
        first = last
    return waves


def _spend_spare_ranks(
    problem: Problem, wave: IntArray, degree: IntArray, time_s: FloatArray, by_group: IntArray, begin: IntArray
) -> None:
    """Widen the slowest group of a wave while ranks are left and it gets faster; updates `degree` and `time_s`."""
    spare = problem.hdp_size - int(degree[wave].sum())
    heap = [(-time, g) for time, g in zip(time_s[wave].tolist(), wave.tolist(), strict=True)]
    heapq.heapify(heap)
    wider_s: dict[int, list[float]] = {}  # per group the times at its next degrees, the nearest last
    while spare > 0 and heap:
        slowest, g = heapq.heappop(heap)
        if not wider_s.get(g):
            rows = by_group[begin[g] : begin[g + 1]]
            wider_s[g] = _times_at_next(problem, problem.lengths[rows], int(degree[g]), min(spare, _LOOK_AHEAD))
        wider = wider_s[g].pop()
        if wider >= -slowest:
            return
        degree[g] += 1
        time_s[g] = wider
        spare -= 1
        heapq.heappush(heap, (-wider, g))


def _times_at_next(problem: Problem, lengths: IntArray, degree: int, num: int) -> list[float]:
    """Times of a group at `num` degrees above its own, the nearest last."""
    degrees = degree + np.arange(num, 0, -1)
    group = np.repeat(np.arange(num), len(lengths))
    times: list[float] = group_time_s(problem, np.tile(lengths, num), group, degrees, problem.fixed_ratio).tolist()
    return times


def _place_waves(waves: list[IntArray], degree: IntArray, time_s: FloatArray, hdp_size: int) -> Placed:
    """Each group of a wave on the least loaded ranks."""
    first = exclusive_sum(degree)
    ranks = np.zeros(int(degree.sum()), dtype=np.int64)
    micro_batches = np.zeros_like(ranks)
    load, counts = np.zeros(hdp_size), np.zeros(hdp_size, dtype=np.int64)
    for wave in waves:
        size = degree[wave]
        unit, index = spread(size)
        members = np.argsort(load, kind="stable")[: len(unit)]
        rows = first[wave][unit] + index
        ranks[rows], micro_batches[rows] = members, counts[members]
        start = np.maximum.reduceat(load[members], exclusive_sum(size))
        load[members] = (start + time_s[wave])[unit]
        counts[members] += 1
    return Placed(ranks, micro_batches, counts)
