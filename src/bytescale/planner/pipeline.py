"""Candidates of `best` with a pipeline: stacked gangs, levelled packs, short micro-batches at both ends.

A pipeline of P stages waits about (P - 1) first forwards and (P - 1) last backwards, and wherever neighbouring
micro-batches differ. So every rank may begin with a few of its shortest packs (as many on all ranks, which keeps every
gang at one micro-batch number), then runs its gangs widest first, then its other packs, longest first. Smaller packs
make the ends cheaper and pay the constant g more often: how many tokens a pack holds is searched as well.

The makespan of every candidate is computed with the operation graph, so what is compared is what is predicted.
Cost: a Python step a gang and a (rank, stage) for each candidate; the number of candidates is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescale.plan import StepPlan
from bytescale.planner.assemble import plan_of_groups
from bytescale.planner.degree import (
    least_work_degrees,
    micro_batch_s,
    power_of_two,
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
FloatArray = npt.NDArray[np.float64]

_PACK_SHARES = (0.25, 0.06, 0.125, 0.5, 1.0)
"""Tokens of a pack as shares of what a rank holds; the first is where the search starts."""

_PACK_TIMES = (2.0, 1.0, 0.5, 0.7, 0.35, 1.3)
"""Most time of a gang, in times of a full pack: what is longer than its neighbours makes every stage wait."""


@dataclass(frozen=True)
class Shape:
    """One candidate: degrees, tokens of a pack, and packs that every rank runs before its gangs."""

    degree: IntArray
    pack_tokens: int
    num_leading: int


def best_pipeline_plan(problem: Problem, step_s: Callable[[StepPlan], float]) -> StepPlan:
    """The candidate with the shortest step: first the degrees, then the pack size, then the leading packs."""
    size = (problem.num_sequences + problem.hdp_size) * problem.pp_size
    allowed = 3 if size > 200_000 else 6 if size > 40_000 else 20
    least = least_work_degrees(problem).degree
    sizes = [max(1, int(problem.fixed_capacity * share)) for share in _PACK_SHARES]
    shape = Shape(least, sizes[0], problem.pp_size - 1)
    best = stacked_plan(problem, shape)
    best_s = step_s(best)

    def tries(shapes: list[Shape]) -> None:
        nonlocal shape, best, best_s, allowed
        for candidate in shapes:
            if allowed <= 1:
                return
            allowed -= 1
            made = stacked_plan(problem, candidate)
            made_s = step_s(made)
            if made_s < best_s * (1 - 1e-6):
                shape, best, best_s = candidate, made, made_s

    tries([replace(shape, degree=degree) for degree in _degree_candidates(problem, least)])
    tries([replace(shape, degree=power_of_two(shape.degree, problem.hdp_size))])
    tries([replace(shape, pack_tokens=tokens) for tokens in sizes[1:]])
    tries([replace(shape, num_leading=num) for num in (0, 1)])
    return best


def _degree_candidates(problem: Problem, least: IntArray) -> list[IntArray]:
    """Degrees that keep a gang's time below so many times that of a full pack."""
    full = np.array([problem.fixed_capacity])
    pack_s = float(stage_time_s(problem, full, np.ones_like(full), np.array([problem.fixed_ratio]))[0])
    found = {least.tobytes(): least}
    for times in _PACK_TIMES:
        degree = widen(problem, least, pack_s * times)
        found.setdefault(degree.tobytes(), degree)
    return list(found.values())[1:]


def stacked_plan(problem: Problem, shape: Shape) -> StepPlan:
    """The plan of one candidate."""
    lengths, hdp_size, degree = problem.lengths, problem.hdp_size, shape.degree
    alone = (degree > 1) | (lengths > problem.fixed_capacity)
    gangs, singles = np.flatnonzero(alone), np.flatnonzero(~alone)
    gang_degree = degree[gangs]
    ratio = np.minimum(ratio_at(problem, lengths[gangs], gang_degree), 1.0)
    gang_s = stage_time_s(problem, lengths[gangs], gang_degree, ratio)
    ranks, gang_numbers, gang_counts = stack_gangs(gang_degree, hdp_size, gang_s)
    busy = np.bincount(ranks, weights=np.repeat(gang_s, gang_degree), minlength=hdp_size).astype(np.float64)
    fixed = np.full(len(singles), problem.fixed_ratio)
    single_s = sequence_time_s(problem, lengths[singles], np.ones_like(singles), fixed)
    share_s = micro_batch_s(problem) * lengths[singles] / shape.pack_tokens
    chosen, _ = fill_rooms(single_s + share_s, -busy, problem.rank_speed)
    # A sequence longer than a pack fills one alone.
    pack = first_fit_in_segments(chosen, np.minimum(lengths[singles], shape.pack_tokens), shape.pack_tokens)
    stride = int(pack.max(initial=0)) + 1
    unit, which = np.unique(chosen * stride + pack, return_inverse=True)
    unit_s = np.bincount(which, weights=single_s, minlength=len(unit)).astype(np.float64)
    numbers, num_leading = _pack_numbers(unit // stride, unit_s, gang_counts, shape.num_leading)
    return plan_of_groups(
        problem,
        "best",
        sequence=np.concatenate([gangs, singles]),
        degree=np.concatenate([gang_degree, np.ones(len(singles), np.int64)]),
        ranks=np.concatenate([ranks, chosen]),
        micro_batches=np.concatenate([gang_numbers + num_leading, numbers[which]]),
        offload_ratio=np.concatenate([ratio, fixed]),
    )


def _pack_numbers(rank: IntArray, time_s: FloatArray, gang_counts: IntArray, wanted: int) -> tuple[IntArray, int]:
    """Micro-batch number of every pack, and how many packs lead on every rank.

    Of a rank's packs, counted from the shortest, every second one leads until enough do; the others follow the gangs,
    longest first, so that both ends are short.
    """
    per_rank = np.bincount(rank, minlength=len(gang_counts))
    num_leading = min(wanted, int(per_rank.min()))
    shortest = np.lexsort((time_s, rank))
    position = np.zeros(len(rank), dtype=np.int64)
    position[shortest] = np.arange(len(rank)) - np.repeat(np.cumsum(per_rank) - per_rank, per_rank)
    count = per_rank[rank]
    # With fewer than two packs a leading one, the shortest lead and the rest follow.
    spaced = 2 * num_leading <= count
    leads = np.where(spaced, (position % 2 == 1) & (position < 2 * num_leading), position < num_leading)
    lead_number = np.where(spaced, position // 2, position)
    followers_below = np.where(spaced, position - np.minimum((position + 1) // 2, num_leading), position - num_leading)
    tail_number = gang_counts[rank] + num_leading + (count - num_leading - 1 - followers_below)
    return np.where(leads, lead_number, tail_number), num_leading
