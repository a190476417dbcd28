"""From start times to micro-batches: number every rank in time order, singles packed to C between two gangs.

The singles of a rank between two of its gangs form a segment; first-fit decreasing packs all segments at once. A gang
is a micro-batch of its own on each of its ranks. Invariant: on every rank gangs follow their start times, which are
the same on all members, so the order has no cycle. Cost: O(largest segment) numpy rounds and one sort.
"""

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.rows import plan_of_groups, spread
from bytescale.planner.problem import Problem


def first_fit_in_segments(segment: IntArray, sizes: IntArray, capacity: int) -> IntArray:
    """Pack number of each item inside its segment, by first-fit decreasing. Shape of `segment`."""
    pack = np.zeros(len(segment), dtype=np.int64)
    if not len(segment):
        return pack
    order = np.lexsort((-sizes, segment))
    _, dense = np.unique(segment[order], return_inverse=True)
    counts = np.bincount(dense)
    first = exclusive_sum(counts)
    # Most items first, so that the segments still active at round j are a prefix.
    by_count = np.argsort(-counts, kind="stable")
    active = np.cumsum(np.bincount(counts)[::-1])[::-1]
    tokens = np.bincount(dense, weights=sizes[order])
    room = np.full((len(counts), 2 * int(tokens.max() // capacity) + 2), capacity, dtype=np.int64)
    for j in range(int(counts.max())):
        num = int(active[j + 1])
        items = order[first[by_count[:num]] + j]
        chosen = (room[:num] >= sizes[items][:, None]).argmax(axis=1)
        pack[items] = chosen
        room[np.arange(num), chosen] -= sizes[items]
    return pack


def plan_of_starts(
    problem: Problem,
    strategy: str,
    *,
    degree: IntArray,
    ratio: FloatArray,
    ranks: IntArray,
    start_s: FloatArray,
) -> StepPlan:
    """The plan in which every sequence starts about when it says.

    Args:
        problem: what was asked.
        strategy: name the plan carries.
        degree: of each sequence. Shape [n].
        ratio: offload ratio of each sequence.
        ranks: members, grouped by sequence. Shape [sum(degree)].
        start_s: of each sequence; of singles only their order relative to the gangs of the rank matters.
    """
    item, _ = spread(degree)
    alone = (degree > 1) | (problem.lengths > problem.fixed_capacity)
    row_alone = alone[item]
    order = np.lexsort((start_s[item], ranks))
    gangs_before = exclusive_sum(row_alone[order].astype(np.int64))
    segment = np.zeros(len(item), dtype=np.int64)
    segment[order] = gangs_before
    # Gangs of lower ranks are counted too; together with the rank that still tells segments apart, in order.
    rows = np.flatnonzero(~row_alone)
    stride = int(segment.max(initial=0)) + 1
    pack = first_fit_in_segments(
        ranks[rows] * stride + segment[rows], problem.lengths[item[rows]], problem.fixed_capacity
    )
    # Units in order of (rank, segment, singles' packs before the gang that ends the segment).
    num_packs = int(pack.max(initial=-1)) + 2
    place = np.full(len(item), num_packs - 1, dtype=np.int64)
    place[rows] = pack
    unit = (ranks * stride + segment) * num_packs + place
    distinct, which = np.unique(unit, return_inverse=True)
    unit_rank = distinct // (stride * num_packs)
    number = np.arange(len(distinct)) - np.searchsorted(unit_rank, unit_rank)
    return plan_of_groups(
        problem,
        strategy,
        sequence=np.arange(len(degree)),
        degree=degree,
        ranks=ranks,
        micro_batches=number[which],
        offload_ratio=ratio,
    )
