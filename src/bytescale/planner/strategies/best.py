"""`best`: ours. Never worse than any other strategy under the same cost model, memory rule and gang rule.

1. Degrees and timeline (`search.degrees`): degrees of least rank-seconds (offload ratio chosen with them),
   widened to a few targets; gangs longest first on the least loaded ranks, later gangs in the gaps that waiting
   leaves, single sequences into the room that remains. The best of so many candidates is kept.
2. Multifit (`search.multifit`) where the batch is not too large, and a seeded random search on few ranks.
3. Micro-batches: singles packed to C between the gangs of a rank.
4. The other strategies are planned as well while the batch is small enough; if one predicts a shorter step its plan is
   returned. Beyond `RIVAL_LIMIT` this is only done when ours is far from the lower bound.
5. In small batches the shortest sequences become whole again where that costs less than predictions are good for
   (`search.narrow`, 0.1 %).

Every search is limited by counted tries, never by the clock; equal input and seed give an equal plan. What provably
cannot win is left out. With a pipeline gangs are stacked (`parts.levels`), sizes and orders of packs are
tried and the makespan decides.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bytescale.arrays import FloatArray
from bytescale.cost.predict import durations, least_time_s, lower_bound_s, rank_times_s
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import (
    Degrees,
    least_work_degrees,
    micro_batch_s,
    ratio_at,
    sequence_time_s,
)
from bytescale.planner.parts.micro_batches import plan_of_starts
from bytescale.planner.parts.timing import predicted, step_s
from bytescale.planner.problem import Problem
from bytescale.planner.search.degrees import GOOD_ENOUGH, search
from bytescale.planner.search.multifit import Placement
from bytescale.planner.search.narrow import narrowed
from bytescale.planner.search.pipeline import best_pipeline_plan
from bytescale.planner.strategy import Strategy

RIVAL_LIMIT = 6_000
"""Sequences plus ranks up to which the other strategies are always planned too."""

FAR_FROM_BOUND = 0.03
"""Above the limit they are planned only when ours is farther than this from the bound."""


def plan_best(problem: Problem, rivals: Sequence[Strategy]) -> StepPlan:
    """The best plan found, predicted, under the name of the strategy that made it.

    Args:
        problem: what is asked.
        rivals: the other strategies, planned from the last to the first.
    """
    least = least_work_degrees(problem)
    bound = reachable_s(problem, least)
    if problem.pp_size == 1:
        own = own_plans(problem, least, bound)
    else:
        own = [predicted(problem, best_pipeline_plan(problem))]
    chosen = min(own, key=step_s)
    small = problem.num_sequences + problem.hdp_size <= RIVAL_LIMIT
    far = step_s(chosen) > bound * (1 + (GOOD_ENOUGH if small else FAR_FROM_BOUND))
    if far or (small and problem.num_sequences <= 64):
        for rival in reversed(rivals):
            shorter = _shorter_plan(problem, rival, step_s(chosen))
            chosen = chosen if shorter is None else shorter
    return narrowed(problem, chosen)


def _shorter_plan(problem: Problem, rival: Strategy, below_s: float) -> StepPlan | None:
    """The plan of another strategy if it takes less than `below_s`."""
    if rival.makes_blocks and not problem.allow_blocks:
        return None
    try:
        if rival.bound_s is not None and problem.pp_size == 1 and rival.bound_s(problem) >= below_s:
            return None
        plan = rival.plan(problem)
    except UserError:
        return None
    # The busiest rank alone refuses most of them, without the makespan.
    times = durations(plan, problem.cost, problem.rank_speed)
    if float(rank_times_s(plan, times).max()) >= below_s:
        return None
    plan = predicted(problem, plan)
    return plan if step_s(plan) < below_s * (1 - 1e-12) else None


def reachable_s(problem: Problem, least: Degrees) -> float:
    """What a search can stop at: the lower bound, with the least work that memory allows and the fewest constants g."""
    cost, lengths, constant_s = problem.cost, problem.lengths, micro_batch_s(problem)
    bound = lower_bound_s(cost, lengths, problem.hdp_size, problem.pp_size, problem.rank_speed)
    work_s = float((sequence_time_s(problem, lengths, least.degree, least.offload_ratio) * least.degree).sum())
    work_s += int(lengths.sum()) / problem.fixed_capacity * constant_s
    longest_s = least_time_s(cost, int(lengths.max()), problem.hdp_size)[0] + constant_s
    if problem.rank_speed is None:
        return max(bound, work_s / problem.hdp_size, longest_s)
    return max(bound, work_s / float(problem.rank_speed.sum()), longest_s / float(problem.rank_speed.max()))


def own_plans(problem: Problem, least: Degrees, bound: float) -> list[StepPlan]:
    """Our plans without a pipeline, predicted, to choose from.

    With offloading to choose, also the plan without it, where it can win; with rank speeds, also the plan for equal
    ranks with the ranks renamed, so that the most loaded is the fastest.
    """
    seen: set[bytes] = set()
    plans = [_plan_of(problem, placement) for placement in search(problem, least.degree, bound, seen)]
    shortest_s = min(step_s(plan) for plan in plans)
    longest = int(problem.lengths.max())
    fits_without = longest <= problem.tokens_per_rank * problem.hdp_size
    if problem.offload == "auto" and fits_without and shortest_s > bound * (1 + GOOD_ENOUGH):
        kept = replace(problem, offload="off")
        fewest = least_work_degrees(kept)
        # From equal degrees the search would run the same way.
        if reachable_s(kept, fewest) < shortest_s and not np.array_equal(fewest.degree, least.degree):
            others = search(kept, fewest.degree, bound, seen, below_s=shortest_s, second=True)
            plans += [_plan_of(kept, placement) for placement in others]
    if problem.rank_speed is not None:
        even = replace(problem, rank_speed=None)
        others = search(even, least.degree, reachable_s(even, least), set())
        plans += [_plan_of(problem, _rename_ranks(even, placement, problem.rank_speed)) for placement in others]
    return plans


def _plan_of(problem: Problem, placement: Placement) -> StepPlan:
    plan = plan_of_starts(
        problem,
        "best",
        degree=placement.degree,
        ratio=np.minimum(ratio_at(problem, problem.lengths, placement.degree), 1.0),
        ranks=placement.ranks,
        start_s=placement.start_s,
    )
    return predicted(problem, plan)


def _rename_ranks(problem: Problem, placement: Placement, speed: FloatArray) -> Placement:
    """Give the most loaded rank the fastest place, and so on."""
    ratio = ratio_at(problem, problem.lengths, placement.degree)
    time_s = sequence_time_s(problem, problem.lengths, placement.degree, np.minimum(ratio, 1.0))
    load = np.bincount(placement.ranks, weights=np.repeat(time_s, placement.degree), minlength=problem.hdp_size)
    name = np.zeros(problem.hdp_size, dtype=np.int64)
    name[np.argsort(-load, kind="stable")] = np.argsort(-speed, kind="stable")
    return replace(placement, ranks=name[placement.ranks])
