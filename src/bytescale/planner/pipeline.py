"""Candidates of `best` with a pipeline: stacked gangs at several degrees, packs levelled over the pipelines.

1F1B wants neighbouring micro-batches of equal time, so each pipeline runs its gangs, then its packs, longest first.
Packs hold at most C tokens; their sequences are levelled over the pipelines before they are packed. The makespan of
every candidate is computed with the operation graph, so what is compared is what is predicted.

Cost: a Python step a gang and candidate; the number of candidates is fixed.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bytescale.plan import StepPlan
from bytescale.planner.assemble import plan_of_groups
from bytescale.planner.balance import numbers_after
from bytescale.planner.degree import (
    least_work_degrees,
    micro_batch_s,
    ratio_at,
    sequence_time_s,
    stage_time_s,
    widen,
)
from bytescale.planner.micro_batches import first_fit_in_segments
from bytescale.planner.problem import Problem
from bytescale.planner.stack import stack_gangs
from bytescale.planner.timeline import fill_rooms

IntArray = npt.NDArray[np.int64]

_TARGETS = (10.0, 1.0, 0.5, 0.25, 0.125)


def pipeline_candidates(problem: Problem, bound: float) -> Iterator[StepPlan]:
    """Plans to choose from; at least one."""
    least = least_work_degrees(problem).degree
    seen: set[bytes] = set()
    num = problem.num_sequences + problem.hdp_size
    limit = 1 if num > 50_000 else 2 if num > 10_000 else len(_TARGETS)
    for target in _TARGETS[:limit]:
        degree = widen(problem, least, bound * target)
        if degree.tobytes() not in seen:
            seen.add(degree.tobytes())
            yield stacked_plan(problem, degree)


def stacked_plan(problem: Problem, degree: IntArray) -> StepPlan:
    """Gangs widest first at equal micro-batch numbers, then packs on the pipelines with most time left."""
    lengths, hdp_size = problem.lengths, problem.hdp_size
    alone = (degree > 1) | (lengths > problem.fixed_capacity)
    gangs, singles = np.flatnonzero(alone), np.flatnonzero(~alone)
    gang_degree = degree[gangs]
    ratio = np.minimum(ratio_at(problem, lengths[gangs], gang_degree), 1.0)
    gang_s = stage_time_s(problem, lengths[gangs], gang_degree, ratio)
    ranks, micro_batches, counts = stack_gangs(gang_degree, hdp_size, gang_s)
    busy = np.bincount(ranks, weights=np.repeat(gang_s, gang_degree), minlength=hdp_size).astype(np.float64)
    fixed = np.full(len(singles), problem.fixed_ratio)
    single_s = sequence_time_s(problem, lengths[singles], np.ones_like(singles), fixed)
    share_s = micro_batch_s(problem) * lengths[singles] / problem.fixed_capacity
    chosen, _ = fill_rooms(single_s + share_s, -busy, problem.rank_speed)
    pack = first_fit_in_segments(chosen, lengths[singles], problem.fixed_capacity)
    unit, which = np.unique(chosen * (int(pack.max(initial=0)) + 1) + pack, return_inverse=True)
    unit_rank = unit // (int(pack.max(initial=0)) + 1)
    unit_s = np.bincount(which, weights=single_s, minlength=len(unit)).astype(np.float64)
    number = numbers_after(unit_rank, unit_s, counts)
    return plan_of_groups(
        problem,
        "best",
        sequence=np.concatenate([gangs, singles]),
        degree=np.concatenate([gang_degree, np.ones(len(singles), np.int64)]),
        ranks=np.concatenate([ranks, chosen]),
        micro_batches=np.concatenate([micro_batches, number[which]]),
        offload_ratio=np.concatenate([ratio, fixed]),
    )
