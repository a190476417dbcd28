"""How many ranks a sequence gets and how much of it is offloaded.

Memory (rule 2 of the validator): a piece of n = ceil(s / D) tokens with ratio r keeps n * (k + (1 - r)(l - k)) / l
tokens on the device, k = min(2, l), and may keep C. So at degree D the least ratio is

    r(D) = max(0, (1 - C / n) * l / (l - k)),        infeasible above 1.

Paper, Eq. 3 (`paper_degrees`): the largest ratio whose copy hides behind one layer's compute is
r_hi = min(1, T(s) * B / Act(s)); offloading is worth starting from r_lo = min(1, l*C / ((l - k)*s)), one rank's worth.
With r_hi >= r_lo the fewest ranks are ceil(kept(r_hi) * s / C), and the ratio is then lowered to r(D), which needs no
more ranks. The paper is silent on r_hi < r_lo: nothing is offloaded and D = ceil(s / C). Ours beside it: a rank never
takes more than `problem.offload_cap` * C tokens (1.5; Eq. 3 itself has no such limit), since fewest ranks, taken
literally, make the longest sequence last longer than the step. Only a sequence that all ranks together cannot hold
otherwise goes beyond, its exposed copies counted.

Ours (`least_work_degrees`): among a ladder of degrees that memory allows, the one with the least rank-seconds; then
`widen` raises degrees until a sequence's time fits a target or falls no more.

Cost: O(n) for the rules, O(n log R) for widening; numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray, ceil_div
from bytescale.cost.model import constant_s, layer_time_s, piece_times_s
from bytescale.plan.memory import NUM_RESIDENT_LAYERS, capacity_tokens, kept_share, least_offload_ratio
from bytescale.planner.problem import Problem, too_long

LEAST_PIECE_TOKENS = 64
"""Widening never makes pieces smaller than this: below it real kernels gain nothing, whatever coefficients say."""

WIDEN_SLACK = 0.002
"""Widening that cannot meet a target stops this close to the least time: the last ranks gain next to nothing."""

_LOOK_AHEAD = 4.0
"""Fastest degrees are searched together for all sequences that a target this many times narrower would widen."""

_LADDER = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)

BINDS_SHORT, BINDS_MEMORY, BINDS_COPY, BINDS_CAP, BINDS_RANKS = range(5)
BINDING = (
    "fits one rank",
    "memory: ceil(s / C) ranks, too little compute to hide a copy worth a rank",
    "copy: the largest ratio that hides behind compute",
    "cap: offload_cap * C tokens a rank",
    "ranks: all of them, copies exposed",
)
"""What a `binds` code means."""


@dataclass(frozen=True)
class Degrees:
    """Per sequence: cp_degree, offload ratio, and which constraint decided (`BINDING`). All of shape [n]."""

    degree: IntArray
    offload_ratio: FloatArray
    binds: IntArray


def least_ratio(problem: Problem, lengths: IntArray, degree: IntArray) -> FloatArray:
    """r(D): least offload ratio with which pieces of ceil(s / D) tokens fit; above 1 where none does."""
    return least_offload_ratio(ceil_div(lengths, degree), problem.tokens_per_rank, problem.num_layers)


def hidden_ratio(problem: Problem, lengths: IntArray) -> FloatArray:
    """r_hi: largest ratio whose copy hides behind the forward of one layer."""
    cost = problem.cost
    compute_s = layer_time_s(cost, cost.forward, lengths) + constant_s(cost)[0]
    copy_s = (cost.activation_bytes_per_token * lengths + cost.activation_bytes) / cost.copy_bytes_per_s
    hidden: FloatArray = np.divide(compute_s, copy_s, out=np.ones_like(compute_s), where=copy_s > 0)
    return np.minimum(1.0, hidden)


def paper_degrees(problem: Problem) -> Degrees:
    """Eq. 3 under `problem.offload_cap`.

    Raises:
        UserError: a sequence needs more ranks than exist.
    """
    lengths, capacity = problem.lengths, problem.tokens_per_rank
    if problem.offload != "auto":
        return _fixed_degrees(problem)
    degree = ceil_div(lengths, capacity)
    binds = np.where(degree == 1, BINDS_SHORT, BINDS_MEMORY)
    num_layers = problem.num_layers
    resident = min(NUM_RESIDENT_LAYERS, num_layers)
    if num_layers > resident:
        high = hidden_ratio(problem, lengths)
        low = np.minimum(1.0, num_layers * capacity / ((num_layers - resident) * lengths))
        by_copy = np.ceil(kept_share(high, num_layers) * lengths / capacity - 1e-9).astype(np.int64)
        by_cap = np.ceil(lengths / (problem.offload_cap * capacity)).astype(np.int64)
        fewest = np.maximum(np.maximum(by_copy, by_cap), 1)
        # Pieces are whole tokens, so the least ratio can lie a token above the hidden one: then one more rank.
        fewest += least_ratio(problem, lengths, fewest) > high
        use = (degree > 1) & (high >= low) & (fewest < degree)
        degree = np.where(use, fewest, degree)
        binds = np.where(use, np.where(by_copy >= by_cap, BINDS_COPY, BINDS_CAP), binds)
    forced = degree > problem.hdp_size
    degree = np.where(forced, problem.hdp_size, degree)
    binds = np.where(forced, BINDS_RANKS, binds)
    ratio = least_ratio(problem, lengths, degree)
    _refuse_infeasible(problem, ratio)
    return Degrees(degree, ratio, binds)


def _fixed_degrees(problem: Problem) -> Degrees:
    degree = ceil_div(problem.lengths, problem.fixed_capacity)
    if int(degree.max()) > problem.hdp_size:
        raise too_long(problem, int(degree.argmax()), problem.fixed_capacity, problem.hdp_size)
    binds = np.where(degree == 1, BINDS_SHORT, BINDS_MEMORY)
    return Degrees(degree, np.full(len(degree), problem.fixed_ratio), binds)


def _refuse_infeasible(problem: Problem, ratio: FloatArray) -> None:
    if np.any(ratio > 1.0 + 1e-12):
        capacity = capacity_tokens(problem.tokens_per_rank, 1.0, problem.num_layers)
        raise too_long(problem, int(ratio.argmax()), capacity, problem.hdp_size)


def stage_time_s(
    problem: Problem, lengths: IntArray, degree: IntArray, ratio: FloatArray, before: IntArray | int = 0
) -> FloatArray:
    """Time of one rank for its piece on the fullest stage, both directions; g once, as a micro-batch of its own.

    `before` are kept earlier tokens, where `lengths` are those of chunks.
    """
    return sequence_time_s(problem, lengths, degree, ratio, before) + micro_batch_s(problem)


def micro_batch_s(problem: Problem) -> float:
    """What every micro-batch costs besides its sequences: g over the layers of a stage, both directions."""
    return sum(constant_s(problem.cost)) * problem.num_layers


def sequence_time_s(
    problem: Problem, lengths: IntArray, degree: IntArray, ratio: FloatArray, before: IntArray | int = 0
) -> FloatArray:
    """`stage_time_s` without g."""
    cost = problem.cost
    forward_s, backward_s = piece_times_s(cost, lengths, degree, ratio, before=before)
    total = (forward_s + backward_s) * problem.num_layers
    if problem.pp_size == 1:
        total = total + (cost.forward.ends_token_s + cost.backward.ends_token_s) * lengths / degree
    return np.asarray(total, np.float64)


def group_time_s(problem: Problem, lengths: IntArray, group: IntArray, degree: IntArray, ratio: float) -> FloatArray:
    """Time of one rank for a micro-batch of several sequences at one degree, whose rings advance together; g included.

    A ring step is the sum of the attention blocks or of the transfers, whichever is longer; a group of one sequence
    costs `stage_time_s`.

    Args:
        problem: what was asked.
        lengths: of the sequences. Shape [n].
        group: 0..len(degree)-1 of each sequence. Shape [n].
        degree: of each group.
        ratio: offload ratio of all.
    """
    cost, num = problem.cost, len(degree)
    edge = lengths / degree[group]
    tokens = np.bincount(group, weights=edge, minlength=num)
    link_is_inter = degree > cost.ranks_per_node
    copy_s = ratio * (cost.activation_bytes_per_token * tokens) / cost.copy_bytes_per_s
    times = []
    for direction in (cost.forward, cost.backward):
        block_s = np.bincount(group, weights=direction.square_s * edge * (edge + cost.block_half_tokens), minlength=num)
        step_s = block_s
        if cost.has_communication:
            num_bytes = direction.transfer * cost.kv_bytes_per_token * tokens
            wire_s = np.where(link_is_inter, cost.inter_node.time_s(num_bytes), cost.intra_node.time_s(num_bytes))
            step_s = np.maximum(np.maximum(block_s, wire_s), cost.ring_step_floor_s)
        times.append(direction.token_s * tokens + block_s + (degree - 1) * step_s)
    forward_s, backward_s = times
    backward_s = backward_s + forward_s if cost.recompute else backward_s
    total = (np.maximum(forward_s, copy_s) + np.maximum(backward_s, copy_s)) * problem.num_layers
    if problem.pp_size == 1:
        total = total + (cost.forward.ends_token_s + cost.backward.ends_token_s) * tokens
    return np.asarray(total + micro_batch_s(problem), np.float64)


def ratio_at(problem: Problem, lengths: IntArray, degree: IntArray) -> FloatArray:
    """The offload ratio used at a degree: the fixed one, or the least that fits; above 1 where none does."""
    if problem.offload == "auto":
        return least_ratio(problem, lengths, degree)
    fits = ceil_div(lengths, degree) <= problem.fixed_capacity
    return np.where(fits, problem.fixed_ratio, np.inf)


def least_work_degrees(problem: Problem) -> Degrees:
    """Per sequence the degree with the least rank-seconds that memory allows.

    Raises:
        UserError: a sequence needs more ranks than exist.
    """
    if problem.offload != "auto":
        return _fixed_degrees(problem)
    lengths = problem.lengths
    degree = np.minimum(ceil_div(lengths, problem.tokens_per_rank), problem.hdp_size)
    binds = np.where(degree == 1, BINDS_SHORT, BINDS_MEMORY)
    ratio = least_ratio(problem, lengths, degree)
    _refuse_infeasible(problem, ratio)
    binds = np.where(ratio > 0, BINDS_RANKS, binds)
    rows = np.flatnonzero(degree > 1)
    s = lengths[rows]
    best = degree[rows]
    best_work = best * stage_time_s(problem, s, best, ratio[rows])
    for factor in _LADDER[1:]:
        tried = np.maximum(1, np.ceil(s / (factor * problem.tokens_per_rank)).astype(np.int64))
        r = least_ratio(problem, s, tried)
        legal = (r <= 1.0) & (tried <= problem.hdp_size)
        work = tried * stage_time_s(problem, s, tried, np.minimum(r, 1.0))
        better = legal & (work < best_work * (1 - 1e-6))
        best = np.where(better, tried, best)
        best_work = np.where(better, work, best_work)
        binds[rows[better]] = BINDS_COPY
    degree[rows] = best
    return Degrees(degree, least_ratio(problem, lengths, degree), binds)


def power_of_two(degree: IntArray, hdp_size: int) -> IntArray:
    """Degrees rounded up to powers of two, or to all ranks."""
    return np.minimum(hdp_size, np.exp2(np.ceil(np.log2(degree))).astype(np.int64))


def widen(problem: Problem, degree: IntArray, target_s: float) -> IntArray:
    """Raise degrees until each sequence takes at most `target_s`, or where that cannot be, until it falls no more.

    A sequence that cannot meet the target stops at the fewest ranks within `WIDEN_SLACK` of its least time.
    """
    return Widening(problem, degree).to(target_s)


class Widening:
    """`widen` of one problem and its degrees for many targets: the fastest degree of a sequence is searched once."""

    def __init__(self, problem: Problem, degree: IntArray) -> None:
        self._problem, self._degree = problem, degree
        self._time_s = self._time_at(np.arange(len(degree)), degree)
        self._fastest = np.zeros_like(degree)  # 0 where no target has asked for it yet
        self._least_s = np.zeros(len(degree))

    def to(self, target_s: float) -> IntArray:
        """The degrees at which sequences take at most `target_s`, see `widen`."""
        rows = np.flatnonzero(self._time_s > target_s)
        if not len(rows):
            return self._degree
        if np.any(self._fastest[rows] == 0):
            # Narrower targets follow as a rule: a search costs as much for a few sequences as for many.
            self._find_fastest(np.flatnonzero((self._time_s > target_s / _LOOK_AHEAD) & (self._fastest == 0)))
        low, high = self._degree[rows], self._fastest[rows]
        goal = np.maximum(target_s, self._least_s[rows] * (1 + WIDEN_SLACK))
        while np.any(low < high):
            middle = (low + high) // 2
            enough = self._time_at(rows, middle) <= goal
            high = np.where(enough, middle, high)
            low = np.where(enough, low, np.minimum(middle + 1, high))
        widened = self._degree.copy()
        widened[rows] = high
        return widened

    def _find_fastest(self, rows: IntArray) -> None:
        low = self._degree[rows]
        widest = np.minimum(self._problem.hdp_size, np.maximum(low, self._problem.lengths[rows] // LEAST_PIECE_TOKENS))
        self._fastest[rows] = _fastest_degree(lambda degree: self._time_at(rows, degree), low, widest)
        self._least_s[rows] = self._time_at(rows, self._fastest[rows])

    def _time_at(self, rows: IntArray, degree: IntArray) -> FloatArray:
        lengths = self._problem.lengths[rows]
        return stage_time_s(self._problem, lengths, degree, ratio_at(self._problem, lengths, degree))


def _fastest_degree(time_at: Callable[[IntArray], FloatArray], low: IntArray, widest: IntArray) -> IntArray:
    """Degree of least time at or above `low`: time falls while compute hides transfers, then rises."""
    left, right = low.copy(), widest.copy()
    while np.any(left < right):
        middle = (left + right) // 2
        time_s = time_at(np.stack([middle, np.minimum(middle + 1, widest)]))
        falling = time_s[1] < time_s[0]
        left = np.where(falling & (left < right), np.minimum(middle + 1, right), left)
        right = np.where(falling, right, np.maximum(middle, left))
    return left
