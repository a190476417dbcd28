"""`hdp-balance`: Algorithm 2 of ByteScale in place of line 10 of Algorithm 1.

Degrees, offload ratios and packs are those of `hdp-naive`. Units (long sequences, packs) go longest first into buckets
of about equal work; again and again the ranks that lag behind the busiest by more than delta take units.

DP-Balance (no pipeline): units come from the first bucket, the most lagging rank first, one unit a rank and round.
PP-Balance: units come one after another across all buckets, so what matters is their order. Equal units should follow
each other on a pipeline, and a sequence shared by pipelines must sit at the same micro-batch number on all of them. The
paper leaves the order open. `parts.pipeline_orders` has those that follow its text; each is timed, the arrival order of
Algorithm 1 as well, and the shortest step is taken.

Where the paper is silent. Bootstrap: when nobody lags, all ranks are targets. delta: half the time of the shortest unit
of the bucket, so a rank counts as lagging when that unit helps it. Buckets: 8. A gang wider than the lagging ranks also
takes the next least loaded. All members end together. What other choices do is in docs/log.md.

Cost: O((units / R) * R log R), numpy; with a pipeline six orders, each timed, and a Python step a gang.
"""

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import paper_degrees
from bytescale.planner.parts.pipeline_orders import pipeline_orders
from bytescale.planner.parts.rows import Placed, spread
from bytescale.planner.parts.timing import shortest_plan
from bytescale.planner.parts.units import units_of
from bytescale.planner.problem import Problem
from bytescale.planner.strategies.hdp_naive import place_rows

NUM_BUCKETS = 8
DELTA = 0.5


def plan_balance(problem: Problem) -> StepPlan:
    """Algorithm 1 with Algorithm 2 as its placement."""
    choice = paper_degrees(problem)
    units = units_of(problem, choice.degree, choice.offload_ratio, problem.fixed_capacity)
    if problem.pp_size == 1:
        return units.plan(problem, "hdp-balance", balance_units(units.degree, units.time_s, problem))
    as_arrived = place_rows(problem, units.degree[: units.num_long], units.num_packs)
    orders = (*pipeline_orders(problem, units), as_arrived)
    return shortest_plan(problem, (units.plan(problem, "hdp-balance", placed) for placed in orders))


def balance_units(
    degree: IntArray, time_s: FloatArray, problem: Problem, num_buckets: int = NUM_BUCKETS, delta: float = DELTA
) -> Placed:
    """DP-Balance."""
    hdp_size = problem.hdp_size
    order = np.argsort(-time_s, kind="stable")
    work = np.cumsum((degree * time_s)[order])
    bucket_ends = np.searchsorted(work, work[-1] * np.arange(1, num_buckets + 1) / num_buckets * (1 - 1e-12)) + 1
    bucket_ends[-1] = len(order)
    first = exclusive_sum(degree)
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
        unit, index = spread(size)
        members = by_load[: len(unit)]
        rows = first[batch][unit] + index
        start = np.maximum.reduceat(exec_s[members], exclusive_sum(size))
        ranks[rows], micro_batches[rows] = members, counts[members]
        counts[members] += 1
        exec_s[members] = (start + time_s[batch])[unit]
        done += count
    return Placed(ranks, micro_batches, counts)
