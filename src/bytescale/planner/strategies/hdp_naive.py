"""`hdp-naive`: Algorithm 1 of ByteScale. Each long sequence gets the ranks it needs, the short ones share packs.

Degrees are ceil(s / C) for s >= C (Eq. 3 when offloading is allowed, see `bytescale.planner.parts.degrees`); shorter
sequences are packed best-fit to C. The paper leaves line 10, the placement, open. Here: long sequences in arrival order
take the next D ranks round the ring of ranks, then the packs do the same one by one. No load is looked at; that is the
balance scheduler's part.

With a pipeline a gang must sit at one micro-batch number on all its ranks (then every stage runs a part of one common
1F1B order and nothing can wait in a circle). So arrival order runs in rows, one micro-batch number a row: a gang that
no longer fits starts the next row and packs fill what is left. Too few packs for that: `levels.stack_gangs`.

Invariant: gangs are placed in one global order, so the order on every rank agrees. Cost: O(pieces).
"""

import numpy as np

from bytescale.arrays import IntArray, exclusive_sum
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import paper_degrees
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.packing import next_fit
from bytescale.planner.parts.rows import Placed, spread
from bytescale.planner.parts.units import units_of
from bytescale.planner.problem import Problem


def plan_naive(problem: Problem) -> StepPlan:
    """Algorithm 1 with round-robin placement."""
    choice = paper_degrees(problem)
    units = units_of(problem, choice.degree, choice.offload_ratio, problem.fixed_capacity)
    place = _round_robin if problem.pp_size == 1 else place_rows
    return units.plan(problem, "hdp-naive", place(problem, units.degree[: units.num_long], units.num_packs))


def _round_robin(problem: Problem, degree: IntArray, num_packs: int) -> Placed:
    """Slot t of the endless row of ranks is rank t mod R in its micro-batch t div R."""
    slot = np.arange(int(degree.sum()) + num_packs)
    ranks, micro_batches = slot % problem.hdp_size, slot // problem.hdp_size
    return Placed(ranks, micro_batches, np.bincount(ranks, minlength=problem.hdp_size))


def place_rows(problem: Problem, degree: IntArray, num_packs: int) -> Placed:
    """Next-fit rows of ranks: the row of a gang is its micro-batch number, packs fill the rows and follow them."""
    hdp_size = problem.hdp_size
    row = next_fit(degree, hdp_size)
    used = np.bincount(row, weights=degree).astype(np.int64)
    if int((hdp_size - used).sum()) > num_packs:
        return _stacked(problem, degree, num_packs)
    item, index = spread(degree)
    first = exclusive_sum(degree)
    ranks = first[item] - exclusive_sum(used)[row[item]] + index
    hole_row, hole = spread(hdp_size - used)
    rest = np.arange(num_packs - len(hole_row))
    ranks = np.concatenate([ranks, used[hole_row] + hole, rest % hdp_size])
    micro_batches = np.concatenate([row[item], hole_row, len(used) + rest // hdp_size])
    return Placed(ranks, micro_batches, np.bincount(ranks, minlength=hdp_size))


def _stacked(problem: Problem, degree: IntArray, num_packs: int) -> Placed:
    gangs = stack_gangs(degree, problem.hdp_size)
    counts = gangs.counts.copy()
    pack_rank = np.zeros(num_packs, dtype=np.int64)
    pack_micro_batch = np.zeros(num_packs, dtype=np.int64)
    for p in range(num_packs):
        r = int(counts.argmin())
        pack_rank[p], pack_micro_batch[p] = r, counts[r]
        counts[r] += 1
    return Placed(np.append(gangs.ranks, pack_rank), np.append(gangs.micro_batches, pack_micro_batch), counts)
