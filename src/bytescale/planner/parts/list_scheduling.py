"""List scheduling: gangs longest first on the least loaded ranks, the rest into the room that is left.

A gang of D ranks starts when the last of them is free, which leaves gaps on the others. Later, smaller gangs go into
gaps; single sequences, longest first, go wherever most room is left, gap or tail. As long as no gap overflows, no gang
is delayed, so the makespan is the largest tail.

Exactness of the batches: list scheduling takes ranks in order of load as long as the next rank is no more loaded than
the least loaded of those just served, so whole prefixes of the sorted ranks are served at once, with the result of the
one-by-one rule. Starts are global times, the same on all ranks of a gang: ordering ranks by them makes no cycle.

Cost: O((n / R) * R log R) numpy for the batches; where gaps are used, a walk over at most `MAX_GAP_GROUPS`
groups a gang.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.planner.parts.rows import spread


@dataclass(frozen=True)
class GangSchedule:
    """Where gangs sit.

    Attributes:
        start_s: of each gang. Shape [num_gangs].
        ranks: members, grouped by gang in the order given. Shape [sum(degree)].
        ready_s: when each rank is free for its tail. Shape [hdp_size].
        gap_rank, gap_begin_s, gap_end_s: idle time before gangs. Shape [num_gaps].
    """

    start_s: FloatArray
    ranks: IntArray
    ready_s: FloatArray
    gap_rank: IntArray
    gap_begin_s: FloatArray
    gap_end_s: FloatArray


def place_gangs(degree: IntArray, time_s: FloatArray, hdp_size: int, speed: FloatArray | None = None) -> GangSchedule:
    """Longest first on the least loaded ranks, in batches; gaps are recorded, not used."""
    order = np.argsort(-time_s, kind="stable")
    first = exclusive_sum(degree)
    start_s = np.zeros(len(degree))
    ranks = np.zeros(int(degree.sum()), dtype=np.int64)
    ready = np.zeros(hdp_size)
    gap_parts: list[tuple[IntArray, FloatArray, FloatArray]] = []
    done = 0
    while done < len(order):
        batch = order[done : done + hdp_size]
        # A slow rank counts as loaded by what the members of the longest gang of the batch would wait for it.
        handicap = 0.0 if speed is None else time_s[batch[0]] * degree[batch[0]] * (1 / speed - 1 / speed.max())
        by_load = np.argsort(ready + handicap, kind="stable")
        score, load = (ready + handicap)[by_load], ready[by_load]
        end = np.cumsum(degree[batch])
        batch = batch[: int(np.searchsorted(end, hdp_size, side="right"))]
        end = end[: len(batch)]
        begin = np.maximum.accumulate(load)[end - 1]
        size = degree[batch]
        lasting = _gang_time_s(time_s[batch], size, by_load, speed)
        # The next gang must not start later than it could after the gangs just placed.
        late = np.flatnonzero(score[end - 1][1:] > np.minimum.accumulate(begin + lasting)[:-1])
        count = int(late[0]) + 1 if len(late) else len(batch)
        batch, begin, size, lasting = batch[:count], begin[:count], size[:count], lasting[:count]
        gang, index = spread(size)
        members = by_load[: len(gang)]
        ranks[first[batch][gang] + index] = members
        start_s[batch] = begin
        waits = begin[gang] > ready[members]
        gap_parts.append((members[waits], ready[members[waits]], begin[gang[waits]]))
        ready[members] = (begin + lasting)[gang]
        done += count
    return GangSchedule(start_s, ranks, ready, *_joined(gap_parts))


def _gang_time_s(time_s: FloatArray, size: IntArray, members: IntArray, speed: FloatArray | None) -> FloatArray:
    """Times of gangs on consecutive `members`: each runs at the pace of its slowest rank."""
    if speed is None:
        return time_s
    return np.asarray(time_s / np.minimum.reduceat(speed[members], exclusive_sum(size)), np.float64)


def _joined(parts: list[tuple[IntArray, FloatArray, FloatArray]]) -> tuple[IntArray, FloatArray, FloatArray]:
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    return (
        np.concatenate([p[0] for p in parts]),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([p[2] for p in parts]),
    )


_GapGroup = tuple[float, list[int], list[float]]

MAX_GAP_GROUPS = 128
"""Gap groups that are searched for a gang; the widest are kept."""


def place_gangs_in_gaps(
    degree: IntArray, time_s: FloatArray, hdp_size: int, speed: FloatArray | None = None
) -> GangSchedule:
    """Longest first, one by one; a gang that fits into the gaps left by an earlier one goes there, at their end.

    The gaps before one gang end together; they are a group (end, ranks, widths ascending). The tightest group that
    holds the gang is taken. Ranks are kept as lists in order of load: a gang is a prefix.
    """
    start_s = [0.0] * len(degree)
    chosen: list[list[int]] = [[]] * len(degree)
    loads, members = [0.0] * hdp_size, list(range(hdp_size))
    groups: list[_GapGroup] = []
    closed: list[_GapGroup] = []
    durations, degrees = time_s.tolist(), degree.tolist()
    for g in np.argsort(-time_s, kind="stable").tolist():
        d, t = degrees[g], durations[g]
        found = _tightest_group(groups, d, t) if speed is None else None
        if found is not None:
            at, (end, ranks, widths) = found[1], groups.pop(found[0])
            chosen[g], start_s[g] = ranks[at : at + d], end - t
            _keep_group(groups, closed, end, ranks[:at] + ranks[at + d :], widths[:at] + widths[at + d :])
            _keep_group(groups, closed, end - t, chosen[g], [width - t for width in widths[at : at + d]])
            continue
        begin = loads[d - 1]
        chosen[g], start_s[g] = members[:d], begin
        if loads[0] < begin:
            _keep_group(groups, closed, begin, members[d - 1 :: -1], [begin - load for load in loads[d - 1 :: -1]])
        del loads[:d], members[:d]
        finish = begin + (t if speed is None else t / float(speed[chosen[g]].min()))
        at = bisect_right(loads, finish)
        loads[at:at] = [finish] * d
        members[at:at] = chosen[g]
    ready = np.zeros(hdp_size)
    ready[members] = loads
    parts = [
        (np.array(ranks, np.int64), end - np.array(widths), np.full(len(ranks), end))
        for end, ranks, widths in [*groups, *closed]
    ]
    ranks_flat = np.array([rank for gang in chosen for rank in sorted(gang)], np.int64)
    return GangSchedule(np.array(start_s), ranks_flat, ready, *_joined(parts))


def _tightest_group(groups: list[_GapGroup], degree: int, time_s: float) -> tuple[int, int] | None:
    """The group whose gaps exceed the gang least, and the first of its gaps to take."""
    best, best_waste = None, float("inf")
    for i, (_, _, widths) in enumerate(groups):
        if len(widths) < degree or widths[-degree] < time_s:
            continue
        at = bisect_left(widths, time_s)
        waste = widths[at + degree - 1] - time_s
        if waste < best_waste:
            best, best_waste = (i, at), waste
    return best


def _keep_group(
    groups: list[_GapGroup], closed: list[_GapGroup], end: float, ranks: list[int], widths: list[float]
) -> None:
    """Add a group without its empty gaps; when there are too many groups the narrowest is closed to gangs."""
    first = bisect_right(widths, 0.0)
    if first == len(widths):
        return
    groups.append((end, ranks[first:], widths[first:]))
    if len(groups) > MAX_GAP_GROUPS:
        closed.append(groups.pop(min(range(len(groups)), key=lambda i: groups[i][2][-1])))


def fill_rooms(time_s: FloatArray, room_s: FloatArray, speed: FloatArray | None = None) -> tuple[IntArray, FloatArray]:
    """Longest first into the bin with most room, in exact batches.

    Returns:
        Bin of each item, and the room left in each bin (negative where it overflows).
    """
    order = np.argsort(-time_s, kind="stable")
    room = room_s.copy()
    chosen = np.zeros(len(time_s), dtype=np.int64)
    done = 0
    while done < len(order):
        batch = order[done : done + len(room)]
        handicap = 0.0 if speed is None else time_s[batch[0]] / speed
        by_room = np.argsort(handicap - room, kind="stable")[: len(batch)]
        before = room[by_room]
        taken = time_s[batch] if speed is None else time_s[batch] / speed[by_room]
        after = before - taken
        late = np.flatnonzero(before[1:] < np.maximum.accumulate(after)[:-1])
        count = int(late[0]) + 1 if len(late) else len(batch)
        chosen[batch[:count]] = by_room[:count]
        room[by_room[:count]] = after[:count]
        done += count
    return chosen, room


@dataclass(frozen=True)
class SinglesPlacement:
    """Where single sequences sit: `bins` 0..R-1 are tails, then gaps in the order of the schedule.

    Attributes:
        bins: bin of each single. Shape [num_singles].
        step_s: largest tail, the makespan.
    """

    bins: IntArray
    step_s: float


def place_singles(
    gangs: GangSchedule, time_s: FloatArray, hdp_size: int, speed: FloatArray | None = None
) -> SinglesPlacement:
    """Fill gaps and tails with single sequences; gaps that overflow give back their shortest ones to the tails."""
    if not len(time_s):
        return SinglesPlacement(np.zeros(0, np.int64), float(gangs.ready_s.max(initial=0.0)))
    width = gangs.gap_end_s - gangs.gap_begin_s
    usable = np.flatnonzero(width >= float(time_s.min()))
    room_of_gaps = width[usable]
    total = float(gangs.ready_s.sum() + time_s.sum() - room_of_gaps.sum()) / hdp_size
    level = max(total, float(gangs.ready_s.max()))
    bin_speed = None if speed is None else np.concatenate([speed, speed[gangs.gap_rank[usable]]])
    room = np.concatenate([level - gangs.ready_s, room_of_gaps])
    bins, left = fill_rooms(time_s, room, bin_speed)
    over = np.flatnonzero(left[hdp_size:] < 0) + hdp_size
    if len(over):
        bins, left = _return_overflow(bins, left, time_s, over, hdp_size, speed)
    step_s = float(level - left[:hdp_size].min())
    is_gap = bins >= hdp_size
    bins[is_gap] = usable[bins[is_gap] - hdp_size] + hdp_size
    return SinglesPlacement(bins, step_s)


def _return_overflow(
    bins: IntArray, left: FloatArray, time_s: FloatArray, over: IntArray, hdp_size: int, speed: FloatArray | None
) -> tuple[IntArray, FloatArray]:
    """Take the shortest singles out of each overfull gap until it fits, and place them on tails."""
    rows = np.flatnonzero(np.isin(bins, over))
    rows = rows[np.lexsort((time_s[rows], bins[rows]))]
    of = bins[rows]
    start = np.searchsorted(of, over)
    running = np.cumsum(time_s[rows])
    base = np.concatenate([[0.0], running])[start]
    position = np.searchsorted(over, of)
    before = running - time_s[rows] - base[position]
    excess = -left[over] if speed is None else -left[over] * float(speed.max())
    removed = rows[before < excess[position]]
    again, tails = fill_rooms(time_s[removed], left[:hdp_size], speed)
    bins[removed] = again
    return bins, np.concatenate([tails, left[hdp_size:]])
