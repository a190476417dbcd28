"""The search of `best` without a pipeline: which degrees, and on which timeline, within counted tries.

Degrees start from those of least rank-seconds and are widened to targets, fractions of the lower bound. Variants round
them to powers of two or to equal shares of the ranks, which leaves fewer gaps when long sequences dominate. Degrees fix
every sequence's time, so rank-seconds / ranks and the longest time bound what any placement of them can reach: those
that cannot beat the best so far are not placed, and narrower targets, which take more rank-seconds, are not looked at.

Cost: candidates * (n log n), numpy, plus about 5 us a gang put into gaps and a sequence and guess of multifit.
"""

from dataclasses import dataclass, field

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.planner.parts.degrees import (
    Widening,
    micro_batch_s,
    power_of_two,
    ratio_at,
    sequence_time_s,
    stage_time_s,
)
from bytescale.planner.parts.list_scheduling import place_gangs, place_gangs_in_gaps, place_singles
from bytescale.planner.parts.rows import spread
from bytescale.planner.problem import Problem
from bytescale.planner.search.multifit import Placement, multifit, random_search

TARGETS = (10.0, 1.0, 0.67, 0.505, 0.4, 0.33, 0.25, 0.2, 0.125, 0.06)
"""Targets of a sequence's time as fractions of the lower bound; 10 widens nothing."""

GOOD_ENOUGH = 5e-4
"""Relative distance to the lower bound at which the search stops."""

LEAST_GAIN = 1e-6
"""Relative gain below which a shorter step is rounding."""

WORTH_FILLING = 0.05
"""Share of the distance to the bound that unfilled gaps must make up before gangs are tried in them."""


@dataclass(frozen=True)
class Budget:
    """Counted limits of the search, from the size of the problem alone.

    Attributes:
        candidates: degree vectors.
        gap_candidates: of those, how many are placed once more with gangs in gaps.
        gap_gangs: gangs of all of these together.
        guesses: of multifit.
        random_tries: of the random search.
    """

    candidates: int
    gap_candidates: int
    gap_gangs: int
    guesses: int
    random_tries: int

    def of_second(self) -> "Budget":
        """For a second search of a problem: it adds other degrees, gaps and guesses would only repeat the first."""
        return Budget(self.candidates // 2, 0, 0, 0, self.random_tries // 2)

    @staticmethod
    def of(problem: Problem) -> "Budget":
        """Limits that keep 512 sequences on 64 ranks in tens of milliseconds and 100,000 on 16,384 below a second."""
        num = problem.num_sequences
        tries = 12_000 // num if problem.hdp_size <= 64 else 0
        return Budget(
            candidates=int(np.clip(300_000 // (num + problem.hdp_size), 5, 12)),
            gap_candidates=3,
            gap_gangs=3_000,
            guesses=int(np.clip(20_000 // num, 0, 6)),
            random_tries=min(tries, 1_000) if tries >= 50 else 0,
        )


@dataclass(frozen=True)
class DegreeCandidate:
    """Degrees, and the times that follow from them.

    Attributes:
        degree: of each sequence. Shape [n].
        gangs, singles: sequences that are a micro-batch of their own, and those that share one.
        gang_s: time of each gang on each of its ranks.
        single_s: time of each single with its share, by tokens, of the constant g of a full micro-batch.
        floor_s: no placement is shorter.
    """

    degree: IntArray
    gangs: IntArray
    singles: IntArray
    gang_s: FloatArray
    single_s: FloatArray
    floor_s: float


def degree_candidate(problem: Problem, degree: IntArray) -> DegreeCandidate:
    """The times of all sequences at given degrees."""
    lengths, speed = problem.lengths, problem.rank_speed
    alone = (degree > 1) | (lengths > problem.fixed_capacity)
    gangs, singles = np.flatnonzero(alone), np.flatnonzero(~alone)
    ratio = np.minimum(ratio_at(problem, lengths[gangs], degree[gangs]), 1.0)
    gang_s = stage_time_s(problem, lengths[gangs], degree[gangs], ratio)
    single_lengths = lengths[singles]
    fixed = np.full(len(singles), problem.fixed_ratio)
    share_s = micro_batch_s(problem) * single_lengths / problem.fixed_capacity
    single_s = sequence_time_s(problem, single_lengths, np.ones_like(singles), fixed) + share_s
    work_s = float(degree[gangs] @ gang_s) + float(single_s.sum())
    longest_s = max(float(gang_s.max(initial=0.0)), float(single_s.max(initial=0.0)))
    # Speeds have mean 1.
    floor_s = max(work_s / problem.hdp_size, longest_s / (1.0 if speed is None else float(speed.max())))
    return DegreeCandidate(degree, gangs, singles, gang_s, single_s, floor_s)


def place(problem: Problem, candidate: DegreeCandidate, use_gaps: bool = False) -> Placement:
    """Gangs, then singles into what is left."""
    degree, gangs, singles = candidate.degree, candidate.gangs, candidate.singles
    gang_degree = degree[gangs]
    put = place_gangs_in_gaps if use_gaps else place_gangs
    timeline = put(gang_degree, candidate.gang_s, problem.hdp_size, problem.rank_speed)
    placed = place_singles(timeline, candidate.single_s, problem.hdp_size, problem.rank_speed)
    start_s = np.zeros(len(degree))
    start_s[gangs] = timeline.start_s
    start_s[singles] = np.concatenate([timeline.ready_s, timeline.gap_begin_s])[placed.bins]
    first = exclusive_sum(degree)
    ranks = np.zeros(int(degree.sum()), dtype=np.int64)
    ranks[first[singles]] = np.concatenate([np.arange(problem.hdp_size), timeline.gap_rank])[placed.bins]
    item, index = spread(gang_degree)
    ranks[first[gangs][item] + index] = timeline.ranks
    width = float((timeline.gap_end_s - timeline.gap_begin_s).sum())
    gaps_s = (width - float(candidate.single_s[placed.bins >= problem.hdp_size].sum())) / problem.hdp_size
    return Placement(degree, start_s, ranks, placed.step_s, gaps_s)


@dataclass
class _Search:
    """The best placement so far and what was candidate.

    Attributes:
        below_s, seen: see `search`.
        placed: every candidate that was placed, with its placement.
        num_tried: degree vectors looked at.
    """

    problem: Problem
    bound: float
    below_s: float
    budget: Budget
    seen: set[bytes]
    best: Placement | None = None
    placed: list[tuple[Placement, DegreeCandidate]] = field(default_factory=list)
    num_tried: int = 0

    @property
    def limit_s(self) -> float:
        """What a placement must stay below."""
        return (self.below_s if self.best is None else self.best.step_s) * (1 - LEAST_GAIN)

    @property
    def done(self) -> bool:
        """Whether the bound is reached as nearly as is asked."""
        return self.best is not None and self.best.step_s <= self.bound * (1 + GOOD_ENOUGH)

    def offer(self, placement: Placement | None) -> None:
        """Keep a placement that is shorter; of equal ones the first."""
        if placement is not None and placement.step_s < self.limit_s:
            self.best = placement

    def try_degrees(self, degree: IntArray) -> bool:
        """Place all sequences at new, legal degrees; false where those cannot win."""
        key = degree.tobytes()
        legal = bool(np.all(ratio_at(self.problem, self.problem.lengths, degree) <= 1.0))
        if key in self.seen or self.num_tried >= self.budget.candidates or not legal:
            return True
        self.seen.add(key)
        self.num_tried += 1
        candidate = degree_candidate(self.problem, degree)
        if candidate.floor_s >= self.limit_s:
            return False
        placement = place(self.problem, candidate)
        self.placed.append((placement, candidate))
        self.offer(placement)
        return True

    def by_step(self) -> list[tuple[Placement, DegreeCandidate]]:
        """What was placed, shortest first."""
        return sorted(self.placed, key=lambda pair: pair[0].step_s)


def search(
    problem: Problem,
    least: IntArray,
    bound: float,
    seen: set[bytes],
    below_s: float = float("inf"),
    second: bool = False,
) -> list[Placement]:
    """The placement with the shortest step among the counted tries, or none when none beats `below_s`.

    Multifit mixes ranks of all nodes, which the times here do not count. Where links between nodes are slower, the best
    placement without it comes second: the prediction decides.

    Args:
        problem: what was asked, without a pipeline.
        least: degrees of least rank-seconds, from which sequences are widened.
        bound: at which step to stop.
        seen: degree vectors of an earlier search of the same lengths, left out; those of this search are added.
        below_s: placements at or above this are dropped.
        second: whether this is a second search, which has fewer tries.
    """
    widening = Widening(problem, least)
    budget = Budget.of(problem).of_second() if second else Budget.of(problem)
    state = _Search(problem, bound, below_s, budget, seen)
    _try_targets(state, widening)
    if not state.done:
        _try_rounded(state, least)
    if not state.done:
        _try_gaps(state)
    found = [] if state.best is None else [state.best]
    if problem.rank_speed is not None or state.done:
        return found
    if budget.guesses:
        state.offer(multifit(problem, widening, bound, state.limit_s, budget.guesses))
    if budget.random_tries and state.best is not None and not state.done:
        rng = np.random.default_rng(problem.seed)
        state.best = random_search(problem, bound, state.best, budget.random_tries, rng)
    if state.best is None or (found and state.best is found[0]):
        return found
    return [state.best, *(found if problem.cost.intra_node != problem.cost.inter_node else [])]


def _try_targets(state: _Search, widening: Widening) -> None:
    """Ever narrower targets, until degrees take too many rank-seconds to win."""
    for target in TARGETS:
        degree = widening.to(state.bound * target)
        # Unwidened degrees may fail by their longest sequence alone, which the next target cuts.
        if (not state.try_degrees(degree) and target < 1) or state.done:
            return


def _try_rounded(state: _Search, least: IntArray) -> None:
    """The two best degree vectors and the narrowest, rounded."""
    hdp_size = state.problem.hdp_size
    for degree in [least, *(candidate.degree for _, candidate in state.by_step()[:2])]:
        for rounded in (power_of_two(degree, hdp_size), _equal_share(degree, hdp_size)):
            state.try_degrees(rounded)
            if state.done:
                return


def _equal_share(degree: IntArray, hdp_size: int) -> IntArray:
    """The widest degree with which as many gangs stand side by side as before."""
    return np.where(degree > 1, hdp_size // (hdp_size // degree), degree)


def _try_gaps(state: _Search) -> None:
    """Gangs in gaps, where what nothing filled explains a part of the distance to the bound."""
    worth = [
        candidate
        for placement, candidate in state.by_step()
        if placement.gaps_s > WORTH_FILLING * (placement.step_s - state.bound)
    ]
    num_gangs = 0
    for candidate in worth[: state.budget.gap_candidates]:
        num_gangs += len(candidate.gangs)
        if num_gangs > state.budget.gap_gangs:
            return
        if candidate.floor_s < state.limit_s:
            state.offer(place(state.problem, candidate, use_gaps=True))
        if state.done:
            return
