"""Gangs under a pipeline: each sits at one micro-batch number on all its ranks.

The same order of gangs on every rank is not enough with 1F1B: a gang at different micro-batch numbers can wait for
itself across stages. If its number is the same on all its ranks, the order of operations of every rank is a part of
one common 1F1B order per stage, and that order has no cycle.

A gang whose sequence runs in chunks takes consecutive numbers, one a chunk. Its backwards are reversed at those numbers
on all its ranks, and all ranks warm up alike, so the argument holds for them too.

Micro-batch numbers have no gaps, so a gang of D ranks needs D ranks with equal counts. Widest first, such ranks always
exist: those of the gang before. Cost: O(gangs * (R + distinct counts)), numpy.
"""

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.planner.parts.rows import Placed


def stack_gangs(
    degree: IntArray,
    hdp_size: int,
    weight: FloatArray | None = None,
    num_chunks: IntArray | None = None,
    wait: FloatArray | None = None,
) -> Placed:
    """Place gangs widest first, ties longest first, on the least loaded ranks with equal counts.

    Args:
        degree: ranks of each gang.
        hdp_size: R.
        weight: time of each gang; None counts gangs.
        num_chunks: consecutive micro-batches that each gang takes; None is one.
        wait: what each gang adds to the load of its ranks where it is the largest of theirs; None adds nothing.

    Returns:
        Where each gang runs; of one that runs in chunks the first of its micro-batches.
    """
    counts = np.zeros(hdp_size, dtype=np.int64)
    busy, waiting = np.zeros(hdp_size), np.zeros(hdp_size)
    first = exclusive_sum(degree)
    ranks = np.zeros(int(degree.sum()), dtype=np.int64)
    micro_batches = np.zeros_like(ranks)
    times = np.ones(len(degree)) if weight is None else weight
    chunks = np.ones_like(degree) if num_chunks is None else num_chunks
    waits = np.zeros(len(degree)) if wait is None else wait
    for g in np.lexsort((-times, -degree)).tolist():
        d = int(degree[g])
        load = busy + np.maximum(waiting, waits[g])
        by_load = np.lexsort((load, counts))
        level = counts[by_load]
        level_begin = np.flatnonzero(np.concatenate([[True], level[1:] != level[:-1]]))
        size = np.diff(np.append(level_begin, hdp_size))
        wide = level_begin[size >= d]
        top = load[by_load[wide + d - 1]]
        at = int(wide[int(top.argmin())])
        chosen = np.sort(by_load[at : at + d])
        rows = slice(int(first[g]), int(first[g]) + d)
        ranks[rows], micro_batches[rows] = chosen, counts[chosen]
        counts[chosen] += chunks[g]
        waiting[chosen] = np.maximum(waiting[chosen], waits[g])
        busy[chosen] = top.min() - waiting[chosen] + times[g]
    return Placed(ranks, micro_batches, counts)
