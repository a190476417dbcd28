"""Candidates of `best` with a pipeline, searched one property after the other.

A pipeline of P stages waits about (P - 1) first forwards and (P - 1) last backwards, and wherever neighbouring
micro-batches differ. So degrees that keep a gang near the time of a full pack are tried, then how many tokens a pack
holds (smaller packs make the ends cheaper and pay the constant g more often), then how many packs lead
(`bytescale.planner.search.pipeline_candidate`). At last the orders of `hdp-balance` (`parts.pipeline_orders`) are tried
at a few of these degrees, and at divisors of the ranks, of which gangs of unlike lengths make full rows; then with
smaller packs at the degrees that came out best.

The makespan of every candidate is computed with the operation graph, so what is compared is what is predicted; it also
says how long each rank waits, by which the candidate is levelled again.
Cost: a Python step a gang and a (rank, stage) for each candidate; the number of candidates is fixed.
"""

from dataclasses import dataclass, replace

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.cost.makespan import makespan
from bytescale.cost.predict import durations, rank_times_s
from bytescale.plan.memory import in_flight_tokens
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import least_work_degrees, power_of_two, ratio_at, stage_time_s, widen
from bytescale.planner.parts.pipeline_orders import pipeline_orders
from bytescale.planner.parts.timing import shortest_plan, step_s
from bytescale.planner.parts.units import units_of
from bytescale.planner.problem import Problem
from bytescale.planner.search.pipeline_candidate import PipelineCandidate, stacked_plan

_PACK_SHARES = (0.25, 0.06, 0.125, 0.5, 1.0)
"""Tokens of a pack as shares of what a rank holds; the first is where the search starts."""

_PACK_TIMES = (2.0, 1.0, 0.5, 0.7, 0.35, 1.3)
"""Most time of a gang, in times of a full pack: what is longer than its neighbours makes every stage wait."""

_ORDER_TIMES = (8.0, 5.0, 3.0)
"""The same where whole levels are put in order, which gain from fewer ranks."""

_ORDER_PACK_SHARES = (0.5, 0.25)
"""Tokens of a pack, as shares, tried there after full packs."""

LEVELLING_ROUNDS = 1
"""How often a candidate is levelled again by the waiting its timeline shows; more gain little (docs/log.md)."""


def best_pipeline_plan(problem: Problem) -> StepPlan:
    """The candidate with the shortest step: first the degrees, then the pack size, then the leading packs."""
    size = (problem.num_sequences + problem.hdp_size) * problem.pp_size
    allowed = 3 if size > 200_000 else 6 if size > 40_000 else 20
    least = least_work_degrees(problem).degree
    sizes = [max(1, int(problem.fixed_capacity * share)) for share in _PACK_SHARES]
    start = PipelineCandidate(least, sizes[0], problem.pp_size - 1)
    best = levelled_plan(problem, start)
    assert best is not None  # whole sequences always fit

    def tries(candidates: list[PipelineCandidate]) -> None:
        nonlocal start, best, allowed
        for candidate in candidates:
            if allowed <= 1:
                return
            allowed -= 1
            levelled = levelled_plan(problem, candidate)
            if levelled is not None and best is not None and levelled.step_s < best.step_s * (1 - 1e-6):
                start, best = candidate, levelled

    tries([replace(start, degree=degree) for degree in _degree_candidates(problem, least)])
    tries([replace(start, degree=power_of_two(start.degree, problem.hdp_size))])
    tries([replace(start, pack_tokens=tokens) for tokens in sizes[1:]])
    tries([replace(start, num_leading=num) for num in (0, 1)])
    degrees = [start.degree, divisor_of(least, problem.hdp_size)]
    if size <= 100_000:
        degrees += [least, *_degree_candidates(problem, least, _ORDER_TIMES)]
    ordered = _best_order(problem, degrees, _ORDER_PACK_SHARES if size <= 100_000 else ())
    return ordered if step_s(ordered) < best.step_s * (1 - 1e-6) else best.plan


def divisor_of(degree: IntArray, hdp_size: int) -> IntArray:
    """Degrees rounded up to divisors of the ranks."""
    divisors = np.flatnonzero(hdp_size % np.arange(1, hdp_size + 1) == 0) + 1
    rounded: IntArray = divisors[np.searchsorted(divisors, degree)].astype(np.int64)
    return rounded


def _best_order(problem: Problem, degrees: list[IntArray], pack_shares: tuple[float, ...]) -> StepPlan:
    """The shortest plan of the orders of `hdp-balance` at other degrees than the fewest, and with smaller packs."""

    def best_at(degree: IntArray, share: float) -> StepPlan:
        ratio = np.minimum(ratio_at(problem, problem.lengths, degree), 1.0)
        units = units_of(problem, degree, ratio, max(1, int(problem.fixed_capacity * share)))
        return shortest_plan(problem, (units.plan(problem, "best", p) for p in pipeline_orders(problem, units)))

    distinct = list({degree.tobytes(): degree for degree in degrees}.values())
    plans = [best_at(degree, 1.0) for degree in distinct]
    best = distinct[int(np.argmin([step_s(plan) for plan in plans]))]
    return min([*plans, *(best_at(best, share) for share in pack_shares)], key=step_s)


@dataclass(frozen=True)
class LevelledPlan:
    """A plan, its predicted step, and how long each rank waits in it until it is done. Shape [hdp_size]."""

    plan: StepPlan
    step_s: float
    waiting_s: FloatArray


def levelled_plan(
    problem: Problem, candidate: PipelineCandidate, strategy: str = "best", rounds: int = LEVELLING_ROUNDS
) -> LevelledPlan | None:
    """The plan of one candidate, its short sequences placed again by the waiting that its timeline shows.

    How long a rank waits for other stages and gangs follows from the whole plan; `candidate.bubble` only guesses it. So
    the plan is timed, and sequences of one rank are levelled once more with the waiting found, `rounds` times.

    Returns:
        The best of these plans; None where its chunks, or what it keeps of them, do not fit.
    """
    best: LevelledPlan | None = None
    waiting_s: FloatArray | None = None
    for _ in range(rounds + 1):
        plan = stacked_plan(problem, candidate, strategy, waiting_s)
        if plan.layout == "chunks" and not _fits(problem, plan):
            break
        timed = _timed(problem, plan)
        if best is None or timed.step_s < best.step_s * (1 - 1e-6):
            best = timed
        waiting_s = timed.waiting_s if waiting_s is None else (waiting_s + timed.waiting_s) / 2
    return best


def _fits(problem: Problem, plan: StepPlan) -> bool:
    """Whether every piece fits alone, and what is in flight fits together; packs are never larger than they may be."""
    if plan.pieces.tokens.max() > problem.fixed_capacity:
        return False
    return bool(in_flight_tokens(plan).max() <= problem.pp_size * problem.tokens_per_rank)


def _timed(problem: Problem, plan: StepPlan) -> LevelledPlan:
    times = durations(plan, problem.cost, problem.rank_speed)
    line = makespan(plan, times.forward_s, times.backward_s)
    ends = line.end_s.reshape(line.gangs.num_gangs, -1).max(axis=1)[line.gangs.gang]
    end_s = np.zeros(plan.hdp_size)
    np.maximum.at(end_s, line.gangs.rank, ends)
    return LevelledPlan(plan, line.step_time_s, end_s - rank_times_s(plan, times))


def _degree_candidates(
    problem: Problem, least: IntArray, most_times: tuple[float, ...] = _PACK_TIMES
) -> list[IntArray]:
    """Degrees that keep a gang's time below so many times that of a full pack."""
    full = np.array([problem.fixed_capacity])
    pack_s = float(stage_time_s(problem, full, np.ones_like(full), np.array([problem.fixed_ratio]))[0])
    found = {least.tobytes(): least}
    for times in most_times:
        degree = widen(problem, least, pack_s * times)
        found.setdefault(degree.tobytes(), degree)
    return list(found.values())[1:]
