"""`static`: one context-parallel degree for all, as Megatron-LM and MegaScale train.

The degree D is the least divisor of hdp_size whose ranks together hold the context, so hdp_size / D data-parallel
groups stand beside each other. Sequences are packed next-fit in arrival order into packs of what D ranks hold; every
sequence of a pack is cut over all D ranks. Packs go round the groups, so group sizes differ by at most one pack.

Memory counts the real pieces: the last index of a zig-zag always holds ceil(s / D) tokens, so a pack is full when the
sum of those would exceed C. Every gang is one aligned block of ranks: no cycle can arise, with or without a pipeline.
"""

import numpy as np

from bytescale.errors import UserError, counted
from bytescale.plan.memory import capacity_tokens
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import group_time_s
from bytescale.planner.parts.packing import next_fit
from bytescale.planner.parts.rows import plan_of_groups, spread
from bytescale.planner.problem import Problem


def static_degree(problem: Problem) -> int:
    """Least divisor of hdp_size whose ranks hold the context.

    Raises:
        UserError: a sequence is longer than the context, or all ranks together do not hold it.
    """
    longest = int(problem.lengths.max())
    if longest > problem.context:
        i = int(problem.lengths.argmax())
        raise UserError(f"sequence {i} has {longest} tokens; the context is {problem.context}: raise --context")
    capacity, ranks = problem.fixed_capacity, problem.hdp_size
    fitting = [d for d in range(1, ranks + 1) if ranks % d == 0 and d * capacity >= problem.context]
    if not fitting:
        more = capacity_tokens(problem.tokens_per_rank, 1.0, problem.num_layers) > capacity
        raise UserError(
            f"static needs {counted(-(-problem.context // capacity), 'rank')} of {counted(capacity, 'token')} for a "
            f"context of {counted(problem.context, 'token')}; {ranks} {'exists' if ranks == 1 else 'exist'}: raise "
            f"tokens_per_rank, or use more ranks{' or offload' * more}"
        )
    return fitting[0]


def static_bound_s(problem: Problem) -> float:
    """Step time of `plan_static` without a pipeline, in O(n); a lower bound where a group straddles nodes.

    Groups never share ranks, so the step is the largest sum of pack times.
    """
    degree = static_degree(problem)
    pack = next_fit(-(-problem.lengths // degree), problem.fixed_capacity)
    degrees = np.full(int(pack.max()) + 1, degree, dtype=np.int64)
    time_s = group_time_s(problem, problem.lengths, pack, degrees, problem.fixed_ratio)
    group = np.arange(len(time_s)) % (problem.hdp_size // degree)
    slowest = 1.0 if problem.rank_speed is None else float(problem.rank_speed.max())
    return float(np.bincount(group, weights=time_s).max()) / slowest


def plan_static(problem: Problem) -> StepPlan:
    """Place every sequence at the one degree."""
    degree = static_degree(problem)
    num_groups = problem.hdp_size // degree
    pack = next_fit(-(-problem.lengths // degree), problem.fixed_capacity)
    degrees = np.full(len(problem.lengths), degree, dtype=np.int64)
    item, index = spread(degrees)
    return plan_of_groups(
        problem,
        "static",
        sequence=np.arange(len(problem.lengths)),
        degree=degrees,
        ranks=pack[item] % num_groups * degree + index,
        micro_batches=pack[item] // num_groups,
        offload_ratio=problem.fixed_ratio,
    )
