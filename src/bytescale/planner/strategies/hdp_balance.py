"""`hdp-balance`: Algorithm 2 of ByteScale in place of line 10 of Algorithm 1.

Degrees, offload ratios and packs are those of `hdp-naive`. Units (long sequences, packs) go longest first into buckets
of about equal work; again and again the ranks that lag behind the busiest by more than delta take units.

DP-Balance (no pipeline): units come from the first bucket, the most lagging rank first, one unit a rank and round.
PP-Balance: pipelines should run stretches of equal units, and a sequence shared by pipelines must sit at the same
micro-batch number on all of them, so gangs are stacked widest first on the least loaded pipelines with equal counts and
packs follow, longest first, where most time is missing; pipelines that hold long sequences get few packs, others many.

Where the paper is silent. Bootstrap: when nobody lags, all ranks are targets. delta: half the time of the shortest unit
of the bucket, so a rank counts as lagging when that unit helps it. Buckets: 8. A gang wider than the lagging ranks also
takes the next least loaded. All members end together. What other choices do is in docs/log.md.

Cost: O((units / R) * R log R), numpy; a Python step a gang with a pipeline.
"""

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import micro_batch_s, paper_degrees, sequence_time_s, stage_time_s
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.list_scheduling import fill_rooms
from bytescale.planner.parts.packing import best_fit
from bytescale.planner.parts.rows import plan_of_groups
from bytescale.planner.problem import Problem

NUM_BUCKETS = 8
DELTA = 0.5


def plan_balance(problem: Problem) -> StepPlan:
    """Algorithm 1 with Algorithm 2 as its placement."""
    choice = paper_degrees(problem)
    capacity = problem.fixed_capacity
    alone = (choice.degree > 1) | (problem.lengths >= capacity)
    long_rows, short_rows = np.flatnonzero(alone), np.flatnonzero(~alone)
    degree, ratio = choice.degree[long_rows], choice.offload_ratio[long_rows]
    long_s = stage_time_s(problem, problem.lengths[long_rows], degree, ratio)
    pack = best_fit(problem.lengths[short_rows], capacity)
    ones = np.ones_like(short_rows)
    short_s = sequence_time_s(problem, problem.lengths[short_rows], ones, choice.offload_ratio[short_rows])
    pack_s = np.asarray(np.bincount(pack, weights=short_s) + micro_batch_s(problem), np.float64)
    if problem.pp_size == 1:
        placed = balance_units(
            np.concatenate([degree, np.ones(len(pack_s), np.int64)]), np.concatenate([long_s, pack_s]), problem
        )
    else:
        placed = _pipelined(degree, long_s, pack_s, problem)
    ranks, micro_batches = placed
    split = int(degree.sum())
    return plan_of_groups(
        problem,
        "hdp-balance",
        sequence=np.concatenate([long_rows, short_rows]),
        degree=np.concatenate([degree, np.ones(len(short_rows), np.int64)]),
        ranks=np.concatenate([ranks[:split], ranks[split:][pack]]),
        micro_batches=np.concatenate([micro_batches[:split], micro_batches[split:][pack]]),
        offload_ratio=np.concatenate([ratio, choice.offload_ratio[short_rows]]),
    )


def balance_units(
    degree: IntArray, time_s: FloatArray, problem: Problem, num_buckets: int = NUM_BUCKETS, delta: float = DELTA
) -> tuple[IntArray, IntArray]:
    """DP-Balance. Rank and micro-batch of every piece, grouped by unit in the order given."""
    hdp_size = problem.hdp_size
    order = np.argsort(-time_s, kind="stable")
    work = np.cumsum((degree * time_s)[order])
    bucket_ends = np.searchsorted(work, work[-1] * np.arange(1, num_buckets + 1) / num_buckets * (1 - 1e-12)) + 1
    bucket_ends[-1] = len(order)
    first = np.cumsum(degree) - degree
    ranks = np.zeros(int(degree.sum()), dtype=np.int64)
    micro_batches = np.zeros_like(ranks)
    exec_s, counts = np.zeros(hdp_size), np.zeros(hdp_size, dtype=np.int64)
    done = 0
    while done < len(order):
        bucket_end = int(bucket_ends[np.searchsorted(bucket_ends, done, side="right")])
        by_load = np.argsort(exec_s, kind="stable")
        lagging = int(np.searchsorted(exec_s[by_load], exec_s[by_load[-1]] - delta * time_s[order[bucket_end - 1]]))
        num_targets = lagging or hdp_size
        batch = order[done : min(bucket_end, done + num_targets)]
        end = np.cumsum(degree[batch])
        # A gang wider than the lagging ranks takes the next least loaded ones as well.
        count = max(1, int(np.searchsorted(end, num_targets, side="right")))
        batch, size = batch[:count], degree[batch[:count]]
        unit = np.repeat(np.arange(count), size)
        members = by_load[: len(unit)]
        rows = first[batch][unit] + np.arange(len(unit)) - (np.cumsum(size) - size)[unit]
        start = np.maximum.reduceat(exec_s[members], np.cumsum(size) - size)
        ranks[rows], micro_batches[rows] = members, counts[members]
        counts[members] += 1
        exec_s[members] = (start + time_s[batch])[unit]
        done += count
    return ranks, micro_batches


def _pipelined(degree: IntArray, long_s: FloatArray, pack_s: FloatArray, problem: Problem) -> tuple[IntArray, IntArray]:
    """PP-Balance: stacked gangs, then packs longest first to the pipeline with most time left."""
    gangs = stack_gangs(degree, problem.hdp_size, long_s)
    busy = np.bincount(gangs.ranks, weights=np.repeat(long_s, degree), minlength=problem.hdp_size).astype(np.float64)
    chosen, _ = fill_rooms(pack_s, -busy, problem.rank_speed)
    numbers = np.append(gangs.micro_batches, numbers_after(chosen, pack_s, gangs.counts))
    return np.append(gangs.ranks, chosen), numbers


def numbers_after(rank: IntArray, time_s: FloatArray, counts: IntArray) -> IntArray:
    """Micro-batch numbers of units appended to their ranks, longest first, behind the `counts` already there."""
    order = np.lexsort((-time_s, rank))
    per_rank = np.bincount(rank, minlength=len(counts))
    numbers = np.zeros(len(rank), dtype=np.int64)
    numbers[order] = np.arange(len(rank)) - np.repeat(np.cumsum(per_rank) - per_rank, per_rank)
    return np.asarray(numbers + counts[rank], np.int64)
