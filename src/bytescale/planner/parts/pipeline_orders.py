"""Orders of the units of a batch in pipelines: which pipelines run which levels, and when.

A pipeline of P stages with micro-batches of times t_1, t_2, ... is done after about sum(t) + (P - 1) * max(t). So its
load counts the longest of its units P times, and pipelines that hold long sequences get few other units.

- `in_rows`: levels one after another, from short to long. Gangs are put first fit into rows of R ranks; a row is one
  micro-batch number, packs fill its holes.
- `on_lagging`: the longest unit first on the ranks whose load is least. Ranks that have run fewer micro-batches than
  the others of a gang run packs before it, so that its number is the same on all.

- `stacked`: the widest gang first on the least loaded ranks with equal counts, which always exist.

Packs that are left go longest first to the rank whose load is least; every rank may begin with some of its shortest.

Invariant: a gang has one micro-batch number on all its ranks and numbers have no gaps, so the order has no cycle.
Cost: O(gangs * counts * R log R) for `on_lagging`, numpy; O(gangs * rows) for `in_rows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.list_scheduling import fill_rooms
from bytescale.planner.parts.rows import Placed, spread
from bytescale.planner.parts.units import Units
from bytescale.planner.problem import Problem


@dataclass(frozen=True)
class _Members:
    """Unit, rank and micro-batch of every member placed so far, in any order of the units. All of one shape."""

    unit: IntArray
    ranks: IntArray
    numbers: IntArray


def pipeline_orders(problem: Problem, units: Units) -> Iterator[Placed]:
    """Each order with and without leading packs, and rows also with loads that do not count waiting."""
    for num_leading in (0, problem.pp_size - 1):
        for order in (in_rows, on_lagging):
            placed = order(problem, units, num_leading)
            if placed is not None:
                yield placed
    placed = in_rows(problem, units, 0, counts_waiting=False)
    if placed is not None:
        yield placed
    yield stacked(problem, units)


def in_rows(problem: Problem, units: Units, num_leading: int, counts_waiting: bool = True) -> Placed | None:
    """Gangs from short to long in rows that packs fill; None where there are too few packs."""
    hdp_size, num = problem.hdp_size, units.num_long
    degree, time_s = units.degree[:num], units.time_s[:num]
    row, offset, room = _first_fit(degree, np.argsort(time_s, kind="stable"), hdp_size)
    if int(room.sum()) > units.num_packs:
        return None
    item, index = spread(degree)
    row_s = np.zeros(len(room))
    np.maximum.at(row_s, row, time_s)
    hole_row, hole = spread(room)
    # The longest packs share rows with the longest gangs.
    order = np.argsort(-row_s[hole_row], kind="stable")
    packs = num + np.argsort(-units.time_s[num:], kind="stable")[: len(hole_row)]
    members = _Members(
        unit=np.append(item, packs),
        ranks=np.append(offset[item] + index, hdp_size - 1 - hole[order]),
        numbers=np.append(row[item], hole_row[order]),
    )
    return _with_packs(problem, units, members, num_leading, counts_waiting)


def _first_fit(degree: IntArray, order: IntArray, hdp_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Row and first rank of each gang, and the ranks left in each row, its last ones."""
    room: list[int] = []
    row, offset = np.zeros_like(degree), np.zeros_like(degree)
    degrees = degree.tolist()
    for g in order.tolist():
        d = degrees[g]
        k = next((k for k, left in enumerate(room) if left >= d), len(room))
        if k == len(room):
            room.append(hdp_size)
        row[g], offset[g] = k, hdp_size - room[k]
        room[k] -= d
    return row, offset, np.array(room, dtype=np.int64)


def on_lagging(problem: Problem, units: Units, num_leading: int) -> Placed | None:
    """Gangs longest first on the least loaded ranks, after packs where counts differ; None where packs run out."""
    hdp_size, num, waits = problem.hdp_size, units.num_long, problem.pp_size - 1
    degree, time_s = units.degree[:num], units.time_s[:num]
    packs = num + np.argsort(-units.time_s[num:], kind="stable")
    pack_s = float(units.time_s[num:].mean()) if len(packs) else 0.0
    left = len(packs) - num_leading * hdp_size
    busy, longest, counts = np.zeros(hdp_size), np.zeros(hdp_size), np.zeros(hdp_size, dtype=np.int64)
    unit: list[IntArray] = [np.zeros(0, np.int64)]
    ranks: list[IntArray] = [np.zeros(0, np.int64)]
    numbers: list[IntArray] = [np.zeros(0, np.int64)]
    used = 0
    for g in np.lexsort((-degree, -time_s)).tolist():
        d, t = int(degree[g]), float(time_s[g])
        best_s, chosen, count = np.inf, None, 0
        for level in np.unique(counts).tolist():
            able = np.flatnonzero(counts <= level)
            missing = level - counts[able]
            load = busy[able] + missing * pack_s + waits * np.maximum(longest[able], t)
            if len(able) < d:
                continue
            least = np.argsort(load, kind="stable")[:d]
            if load[least[-1]] < best_s and int(missing[least].sum()) <= left:
                best_s, chosen, count = float(load[least[-1]]), able[least], level
        if chosen is None:
            return None
        item, index = spread(count - counts[chosen])
        before = packs[used : used + len(item)]
        used, left = used + len(item), left - len(item)
        np.add.at(busy, chosen[item], pack_s)
        unit += [before, np.full(d, g)]
        ranks += [chosen[item], chosen]
        numbers += [counts[chosen][item] + index, np.full(d, count)]
        counts[chosen], busy[chosen] = count + 1, busy[chosen].max() + t
        longest[chosen] = np.maximum(longest[chosen], t)
    members = _Members(np.concatenate(unit), np.concatenate(ranks), np.concatenate(numbers))
    return _with_packs(problem, units, members, num_leading)


def stacked(problem: Problem, units: Units) -> Placed:
    """Gangs widest first on the least loaded ranks with equal counts, which always exist, then all packs."""
    num = units.num_long
    gangs = stack_gangs(units.degree[:num], problem.hdp_size, units.time_s[:num])
    unit = np.repeat(np.arange(num), units.degree[:num])
    return _with_packs(problem, units, _Members(unit, gangs.ranks, gangs.micro_batches), 0, False)


def _with_packs(
    problem: Problem, units: Units, members: _Members, num_leading: int, counts_waiting: bool = True
) -> Placed:
    """Place all remaining packs after what their ranks hold, up to `num_leading` of each rank before it."""
    hdp_size, member_s = problem.hdp_size, units.time_s[members.unit]
    rest = np.setdiff1d(np.arange(len(units.degree)), members.unit)
    room_s = -np.bincount(members.ranks, weights=member_s, minlength=hdp_size).astype(np.float64)
    if counts_waiting:
        longest = np.zeros(hdp_size)
        np.maximum.at(longest, members.ranks, member_s)
        room_s -= (problem.pp_size - 1) * longest
    counts = np.bincount(members.ranks, minlength=hdp_size)
    chosen, _ = fill_rooms(units.time_s[rest], room_s, problem.rank_speed)
    own = np.bincount(chosen, minlength=hdp_size)
    leading = min(num_leading, int(own.min()))
    position = _position(chosen, units.time_s[rest], own)
    behind = counts[chosen] + leading + own[chosen] - 1 - position
    numbers = np.append(members.numbers + leading, np.where(position < leading, position, behind))
    unit, ranks = np.append(members.unit, rest), np.append(members.ranks, chosen)
    by_unit = np.argsort(unit, kind="stable")
    return Placed(ranks[by_unit], numbers[by_unit], counts + own)


def _position(rank: IntArray, time_s: FloatArray, counts: IntArray) -> IntArray:
    """Place of each unit among those of its rank, shortest first."""
    order = np.lexsort((time_s, rank))
    position = np.zeros(len(rank), dtype=np.int64)
    position[order] = spread(counts)[1]
    return position
