"""`best`: ours. Never worse than any other strategy under the same cost model, memory rule and gang rule.

1. Degrees. Start from the degree of least rank-seconds (offload ratio chosen with it), then widen every sequence
   that would take longer than a target; targets are fractions of the lower bound. Variants round degrees to powers of
   two or to equal shares of the ranks, which leaves fewer gaps when long sequences dominate.
2. Timeline (`bytescale.planner.timeline`): gangs longest first on the least loaded ranks, later gangs in the gaps that
   waiting leaves, single sequences into the room that remains. The best of so many candidates is kept.
3. Multifit (`bytescale.planner.moldable`) where the batch is not too large, and a seeded random search on few ranks.
4. Micro-batches: singles packed to C between the gangs of a rank.
5. The other strategies are planned as well while the batch is small enough; if one predicts a shorter step it is
   returned under the name `best`. Beyond `RIVAL_LIMIT` this is only done when ours is far from the lower bound.

Every search is limited by counted tries, never by the clock; equal input and seed give an equal plan. With a pipeline
gangs are stacked (`bytescale.planner.stack`), sizes and orders of packs are tried and the makespan decides.

Cost: candidates * (n log n), numpy, plus about 10 us a sequence and guess of multifit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescale.cost.predict import lower_bound_s, predict
from bytescale.errors import UserError
from bytescale.plan import StepPlan
from bytescale.planner.assemble import spread
from bytescale.planner.degree import (
    least_work_degrees,
    micro_batch_s,
    power_of_two,
    ratio_at,
    sequence_time_s,
    stage_time_s,
    widen,
)
from bytescale.planner.micro_batches import plan_of_starts
from bytescale.planner.moldable import Placement, multifit, random_search
from bytescale.planner.pipeline import best_pipeline_plan
from bytescale.planner.problem import Problem
from bytescale.planner.static import static_bound_s
from bytescale.planner.timeline import place_gangs, place_gangs_in_gaps, place_singles

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

TARGETS = (10.0, 1.0, 0.67, 0.505, 0.4, 0.33, 0.25, 0.2, 0.125, 0.06)
"""Targets of a sequence's time as fractions of the lower bound; 10 widens nothing."""

GOOD_ENOUGH = 5e-4
"""Relative distance to the lower bound at which the search stops."""

WORTH_FILLING = 0.05
"""Share of the distance to the bound that unfilled gaps must make up before gangs are tried in them."""

RIVAL_LIMIT = 6_000
"""Sequences plus ranks up to which the other strategies are always planned too."""

FAR_FROM_BOUND = 0.03
"""Above the limit they are planned only when ours is farther than this from the bound."""


@dataclass(frozen=True)
class Budget:
    """Counted limits of the search, from the size of the problem alone."""

    candidates: int
    gap_candidates: int
    guesses: int
    random_tries: int

    def half(self) -> "Budget":
        """Half of every limit."""
        return Budget(self.candidates // 2, self.gap_candidates // 2, self.guesses // 2, self.random_tries // 2)

    @staticmethod
    def of(problem: Problem, num_gangs: int) -> "Budget":
        """Limits that keep 512 sequences on 64 ranks in tens of milliseconds and 100,000 on 16,384 below a second."""
        num = problem.num_sequences
        tries = 12_000 // num if problem.hdp_size <= 64 else 0
        return Budget(
            candidates=int(np.clip(300_000 // (num + problem.hdp_size), 5, 12)),
            gap_candidates=int(np.clip(3_000 / max(1.0, num_gangs * (1 + problem.hdp_size / 2_000)), 0, 3)),
            guesses=int(np.clip(20_000 // num, 0, 6)),
            random_tries=min(tries, 1_000) if tries >= 50 else 0,
        )


def plan_best(
    problem: Problem, rivals: Mapping[str, Callable[[Problem], StepPlan]], allow_blocks: bool
) -> tuple[StepPlan, str]:
    """The best plan found, named `best`, and the name of the strategy that made it.

    Args:
        problem: what is asked.
        rivals: the other strategies.
        allow_blocks: whether a block plan may be returned.
    """
    bound = reachable_s(problem)
    if problem.pp_size == 1:
        own = own_plans(problem, bound)
    else:
        own = [best_pipeline_plan(problem)]
    scored = [(_step_s(problem, candidate), candidate) for candidate in own]
    step_s, chosen = min(scored, key=lambda pair: pair[0])
    origin = "best"
    small = problem.num_sequences + problem.hdp_size <= RIVAL_LIMIT
    if step_s > bound * (1 + (GOOD_ENOUGH if small else FAR_FROM_BOUND)) or (small and problem.num_sequences <= 64):
        for name, make in rivals.items():
            try:
                if name == "static" and problem.pp_size == 1 and static_bound_s(problem) >= step_s:
                    continue  # its plans can have millions of pieces
                rival = make(problem)
            except UserError:
                continue
            if rival.layout == "blocks" and not allow_blocks:
                continue
            rival_s = _step_s(problem, rival)
            if rival_s < step_s * (1 - 1e-12):
                step_s, chosen, origin = rival_s, rival, name
    return replace(chosen, strategy="best"), origin


def reachable_s(problem: Problem) -> float:
    """What a search can stop at: the lower bound, with the least work that memory allows and the fewest constants g."""
    cost, lengths = problem.cost, problem.lengths
    bound = lower_bound_s(cost, lengths, problem.hdp_size, problem.pp_size, problem.rank_speed)
    least = least_work_degrees(problem)
    work_s = float((sequence_time_s(problem, lengths, least.degree, least.offload_ratio) * least.degree).sum())
    work_s += int(lengths.sum()) / problem.fixed_capacity * micro_batch_s(problem)
    speed = problem.hdp_size if problem.rank_speed is None else float(problem.rank_speed.sum())
    return max(bound, work_s / speed)


def _step_s(problem: Problem, candidate: StepPlan) -> float:
    return predict(candidate, problem.cost, rank_speed=problem.rank_speed).step_time_s


def own_plans(problem: Problem, goal: float) -> list[StepPlan]:
    """Our plans without a pipeline, to choose from.

    With offloading to choose, also the plan without it; with rank speeds, also the plan for equal ranks with the ranks
    renamed, so that the most loaded is the fastest.
    """
    plans = [_plan_of(problem, search(problem, goal))]
    longest = int(problem.lengths.max())
    fits_without = longest <= problem.tokens_per_rank * problem.hdp_size
    if problem.offload == "auto" and fits_without and _step_s(problem, plans[0]) > goal * (1 + GOOD_ENOUGH):
        kept = replace(problem, offload="off")
        plans.append(_plan_of(kept, search(kept, goal, second=True)))
    if problem.rank_speed is not None:
        even = replace(problem, rank_speed=None)
        plans.append(_plan_of(problem, _rename_ranks(even, search(even, reachable_s(even)), problem.rank_speed)))
    return plans


def _plan_of(problem: Problem, placement: Placement) -> StepPlan:
    return plan_of_starts(
        problem,
        "best",
        degree=placement.degree,
        ratio=np.minimum(ratio_at(problem, problem.lengths, placement.degree), 1.0),
        ranks=placement.ranks,
        start_s=placement.start_s,
    )


def _rename_ranks(problem: Problem, placement: Placement, speed: FloatArray) -> Placement:
    """Give the most loaded rank the fastest place, and so on."""
    ratio = ratio_at(problem, problem.lengths, placement.degree)
    time_s = sequence_time_s(problem, problem.lengths, placement.degree, np.minimum(ratio, 1.0))
    load = np.bincount(placement.ranks, weights=np.repeat(time_s, placement.degree), minlength=problem.hdp_size)
    name = np.zeros(problem.hdp_size, dtype=np.int64)
    name[np.argsort(-load, kind="stable")] = np.argsort(-speed, kind="stable")
    return replace(placement, ranks=name[placement.ranks])


def search(problem: Problem, bound: float, second: bool = False) -> Placement:
    """The placement with the shortest step among the counted tries; a second search of a problem has half the tries."""
    least = least_work_degrees(problem).degree
    goal = bound * (1 + GOOD_ENOUGH)
    budget = Budget.of(problem, int((least > 1).sum()))
    budget = budget.half() if second else budget
    tried: list[tuple[float, IntArray]] = []
    with_gaps: list[tuple[float, IntArray]] = []
    best: Placement | None = None
    for degree in _degree_candidates(problem, least, bound, budget.candidates, tried):
        placement = schedule(problem, degree)
        tried.append((placement.step_s, degree))
        # Gaps that nothing filled must explain a part of the distance to the bound, or using them cannot help.
        if placement.gaps_s > WORTH_FILLING * (placement.step_s - bound):
            with_gaps.append((placement.step_s, degree))
        best = _better(best, placement)
        if best.step_s <= goal:
            return best
    assert best is not None
    for _, degree in sorted(with_gaps, key=lambda pair: pair[0])[: budget.gap_candidates]:
        best = _better(best, schedule(problem, degree, use_gaps=True))
        if best.step_s <= goal:
            return best
    if problem.rank_speed is not None:
        return best
    if budget.guesses:
        best = _better(best, multifit(problem, least, bound, best.step_s, budget.guesses))
    if budget.random_tries and best.step_s > goal:
        best = random_search(problem, bound, best, budget.random_tries, np.random.default_rng(problem.seed))
    return best


def _better(best: Placement | None, other: Placement | None) -> Placement:
    """The shorter step; the earlier one unless the gain is more than rounding."""
    if best is None or (other is not None and other.step_s < best.step_s * (1 - 1e-6)):
        assert other is not None
        return other
    return best


def _degree_candidates(
    problem: Problem, least: IntArray, bound: float, limit: int, tried: Sequence[tuple[float, IntArray]]
) -> Iterator[IntArray]:
    """Distinct degree vectors: the targets first, then the two best of those and the narrowest, rounded."""
    seen: set[bytes] = set()
    legal = _legal_degrees(problem)

    def fresh(degree: IntArray) -> bool:
        key = degree.tobytes()
        if key in seen or len(seen) >= limit or not legal(degree):
            return False
        seen.add(key)
        return True

    for target in TARGETS:
        degree = widen(problem, least, bound * target)
        if fresh(degree):
            yield degree
    by_step = [degree for _, degree in sorted(tried, key=lambda pair: pair[0])[:2]]
    for degree in [least, *by_step]:
        for rounded in (power_of_two(degree, problem.hdp_size), _equal_share(degree, problem.hdp_size)):
            if fresh(rounded):
                yield rounded


def _legal_degrees(problem: Problem) -> Callable[[IntArray], bool]:
    return lambda degree: bool(np.all(ratio_at(problem, problem.lengths, degree) <= 1.0))


def _equal_share(degree: IntArray, hdp_size: int) -> IntArray:
    """The widest degree with which as many gangs stand side by side as before."""
    return np.where(degree > 1, hdp_size // (hdp_size // degree), degree)


def schedule(problem: Problem, degree: IntArray, use_gaps: bool = False) -> Placement:
    """Place all sequences at given degrees: gangs, then singles into what is left."""
    lengths, speed = problem.lengths, problem.rank_speed
    alone = (degree > 1) | (lengths > problem.fixed_capacity)
    gangs, singles = np.flatnonzero(alone), np.flatnonzero(~alone)
    gang_degree = degree[gangs]
    ratio = np.minimum(ratio_at(problem, lengths[gangs], gang_degree), 1.0)
    gang_s = stage_time_s(problem, lengths[gangs], gang_degree, ratio)
    place = place_gangs_in_gaps if use_gaps else place_gangs
    timeline = place(gang_degree, gang_s, problem.hdp_size, speed)
    single_lengths = lengths[singles]
    fixed = np.full(len(singles), problem.fixed_ratio)
    # g is shared by the sequences of a micro-batch: count it by tokens until packs are known.
    share_s = micro_batch_s(problem) * single_lengths / problem.fixed_capacity
    single_s = sequence_time_s(problem, single_lengths, np.ones_like(singles), fixed) + share_s
    placed = place_singles(timeline, single_s, problem.hdp_size, speed)
    start_s = np.zeros(len(lengths))
    start_s[gangs] = timeline.start_s
    start_s[singles] = np.concatenate([timeline.ready_s, timeline.gap_begin_s])[placed.bins]
    first = np.cumsum(degree) - degree
    ranks = np.zeros(int(degree.sum()), dtype=np.int64)
    ranks[first[singles]] = np.concatenate([np.arange(problem.hdp_size), timeline.gap_rank])[placed.bins]
    item, index = spread(gang_degree)
    ranks[first[gangs][item] + index] = timeline.ranks
    width = float((timeline.gap_end_s - timeline.gap_begin_s).sum())
    gaps_s = (width - float(single_s[placed.bins >= problem.hdp_size].sum())) / problem.hdp_size
    return Placement(degree, start_s, ranks, placed.step_s, gaps_s)
