"""Multifit for moldable gangs: pack everything under a guessed makespan, then shrink the guess.

For a guess L every sequence wants the fewest ranks that take it at most L (`degree.widen`). Longest first, each goes to
the D ranks whose load is highest among those that still let it end by L (best fit); where no D ranks do, it is tried
wider, so that long pieces shrink into the holes that are left. Single sequences may also go into the gaps that gang
waiting left. If one sequence fits nowhere the guess fails. Bisection finds a small L that works.

List scheduling (`parts.list_scheduling`) is as good when a rank has many sequences; this one pays when there are
about as many sequences as ranks. Cost: about 10 us a sequence and guess; the number of guesses is fixed.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.planner.parts.degrees import Widening, ratio_at, stage_time_s
from bytescale.planner.problem import Problem

_WIDER = ((1.0, 0), (1.0, 1), (1.0, 2), (1.25, 1), (1.5, 1), (2.0, 0), (3.0, 0), (4.0, 0))
"""Degrees tried for a sequence, as (factor, more) on the fewest ranks that meet the guess."""

_MANY = 4


@dataclass(frozen=True)
class Placement:
    """Every sequence placed.

    Attributes:
        degree, start_s: of each sequence.
        ranks: members, grouped by sequence.
        step_s: the largest end.
        gaps_s: idle time before gangs that nothing filled, mean over ranks; 0 where it is not counted.
    """

    degree: IntArray
    start_s: FloatArray
    ranks: IntArray
    step_s: float
    gaps_s: float = 0.0


def multifit(problem: Problem, widening: Widening, low_s: float, high_s: float, num_guesses: int) -> Placement | None:
    """Smallest makespan found between `low_s` and `high_s`; None if nothing below `high_s` works."""
    best: Placement | None = None
    # Few guesses must not be wasted on what cannot work; a wide bracket is closed from below, where success is likely.
    share = 0.5 if num_guesses > 2 else 0.75
    for _ in range(num_guesses):
        guess = low_s + share * (high_s - low_s) if best is not None or high_s < 1.3 * low_s else low_s * 1.1
        placed = pack_under(problem, widening, guess)
        if placed is None:
            low_s = guess
        else:
            best, high_s = placed, placed.step_s
        if high_s <= low_s * 1.0005:
            break
    return best


def degree_options(problem: Problem, widening: Widening, guess_s: float) -> tuple[IntArray, FloatArray]:
    """Degrees to try for each sequence, in order, and the time at each (inf where illegal). Both [num_options, n]."""
    base, lengths = widening.to(guess_s), problem.lengths
    degrees = np.stack([np.ceil(base * factor).astype(np.int64) + more for factor, more in _WIDER])
    legal = degrees <= problem.hdp_size
    if problem.num_sequences >= _MANY * problem.hdp_size:
        # With many sequences a rank the short ones fill holes whole; cutting them would only add traffic.
        legal[1:, lengths <= problem.tokens_per_rank] = False
    option, row = np.nonzero(legal)
    degree = degrees[option, row]
    ratio = ratio_at(problem, lengths[row], degree)
    taken_s = stage_time_s(problem, lengths[row], degree, np.minimum(ratio, 1.0))
    time_s = np.full(degrees.shape, np.inf)
    time_s[option, row] = np.where(ratio <= 1.0, taken_s, np.inf)
    return np.minimum(degrees, problem.hdp_size), time_s


def pack_under(problem: Problem, widening: Widening, guess_s: float) -> Placement | None:
    """Place everything so that it ends by `guess_s`, or None."""
    degrees, times = degree_options(problem, widening, guess_s)
    return place_under(degrees, times, guess_s, np.argsort(-times[0], kind="stable"), problem.hdp_size)


def place_under(
    degrees: IntArray, times: FloatArray, guess_s: float, order: IntArray, hdp_size: int
) -> Placement | None:
    """`pack_under` for given options and order."""
    limit = guess_s * (1 + 1e-12)
    degree_rows, time_rows = degrees.T.tolist(), times.T.tolist()
    ranks = _Ranks([0.0] * hdp_size, list(range(hdp_size)), [])
    num = len(degree_rows)
    degree, start, chosen = [0] * num, [0.0] * num, [[0]] * num
    for i in order.tolist():
        for d, t in zip(degree_rows[i], time_rows[i], strict=True):
            room = limit - t
            if room < 0:
                continue
            placed = ranks.into_gap(t) if d == 1 and ranks.gaps else None
            placed = placed or ranks.on_top(d, t, room)
            if placed:
                degree[i] = d
                start[i], chosen[i] = placed
                break
        else:
            return None
    flat = np.array([rank for group in chosen for rank in group], dtype=np.int64)
    return Placement(np.array(degree, dtype=np.int64), np.array(start), flat, ranks.loads[-1])


@dataclass
class _Ranks:
    """Ranks while they are filled: loads ascending with their ranks beside, and gaps (width, begin, rank) ascending."""

    loads: list[float]
    members: list[int]
    gaps: list[tuple[float, float, int]]

    def into_gap(self, time_s: float) -> tuple[float, list[int]] | None:
        """Put a single sequence into the tightest gap that holds it."""
        k = bisect_left(self.gaps, (time_s, -1.0, -1))
        if k == len(self.gaps):
            return None
        width, begin, rank = self.gaps.pop(k)
        if width > time_s:
            insort(self.gaps, (width - time_s, begin + time_s, rank))
        return begin, [rank]

    def on_top(self, degree: int, time_s: float, room_s: float) -> tuple[float, list[int]] | None:
        """Put a gang on the most loaded ranks whose load is at most `room_s`."""
        end = bisect_right(self.loads, room_s)
        if end < degree:
            return None
        if degree == 1:
            begin, rank = self.loads.pop(end - 1), self.members.pop(end - 1)
            at = bisect_right(self.loads, begin + time_s)
            self.loads.insert(at, begin + time_s)
            self.members.insert(at, rank)
            return begin, [rank]
        first = end - degree
        begin = self.loads[end - 1]
        picked = self.members[first:end]
        if self.loads[first] < begin:
            for load, rank in zip(self.loads[first:end], picked, strict=True):
                if load < begin:
                    insort(self.gaps, (begin - load, load, rank))
        del self.loads[first:end], self.members[first:end]
        finish = begin + time_s
        at = bisect_right(self.loads, finish)
        self.loads[at:at] = [finish] * degree
        self.members[at:at] = picked
        return begin, picked


def random_search(
    problem: Problem, low_s: float, start: Placement, num_tries: int, rng: np.random.Generator
) -> Placement:
    """Perturbed degrees and orders under an ever lower guess; for a few sequences on a few ranks.

    A try raises some degrees above the least that meets the guess, shuffles the order a little, and packs. It counts
    only when everything ends at least 0.1 % earlier than the best so far. The number of tries is fixed.
    """
    num, hdp_size = problem.num_sequences, problem.hdp_size
    degrees = np.repeat(np.arange(1, hdp_size + 1)[:, None], num, axis=1)
    lengths = np.broadcast_to(problem.lengths, degrees.shape)
    ratio = ratio_at(problem, lengths, degrees)
    time_s = np.where(ratio <= 1.0, stage_time_s(problem, lengths, degrees, np.minimum(ratio, 1.0)), np.inf)
    columns = np.arange(num)
    best = start
    for _ in range(num_tries):
        guess = best.step_s * 0.999
        if guess < low_s:
            break
        fits = time_s <= guess
        if not fits.any(axis=0).all():
            break
        bump = (rng.random(num) < rng.choice((0.1, 0.3, 0.5))) * rng.integers(1, max(2, hdp_size), num)
        first = np.minimum(fits.argmax(axis=0) + bump, hdp_size - 1)
        noise = np.exp(rng.normal(0.0, rng.choice((0.0, 0.1, 0.3, 1.0)), num))
        order = np.argsort(-time_s[first, columns] * noise, kind="stable")
        options = np.minimum(first[None, :] + np.arange(min(hdp_size, 6))[:, None], hdp_size - 1)
        found = place_under(options + 1, time_s[options, columns[None, :]], guess, order, hdp_size)
        best = found or best
    return best
