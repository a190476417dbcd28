"""`chunked`: long sequences of a pipeline run as consecutive chunks that keep the earlier chunks' keys and values.

A sequence that crosses P stages as one micro-batch of T seconds a stage makes its ranks wait (P - 1) * T: while it is
in one stage the others have nothing of it. In n chunks, neighbouring micro-batches of the same ranks, the wait is that
of the longest chunk, and fewer ranks can hold it, since a chunk is all that enters a stage at once. The price: the keys
and values of earlier chunks travel once more with every chunk, the backward runs the chunks reversed and cannot start
before the last forward, so all chunks are in flight on every stage, with fp32 gradients of their keys and values.

So each long sequence takes the degree D and the number of chunks n with the least rank-seconds, waiting included,

    D * (sum of its chunks + (P - 1) * longest chunk),

among those that finish within a horizon, whose pieces hold at most a limit of tokens, and whose kept tokens fit beside
the P - 1 micro-batches in flight around them. Horizon, limit, pack size and leading packs are searched; the makespan
of the operation graph decides, and the plan of `best`, of whole sequences, is a candidate too.

Cost: a fixed number of makespans.
"""

from dataclasses import dataclass, replace

import numpy as np

from bytescale.arrays import FloatArray, IntArray, ceil_div
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import stage_time_s
from bytescale.planner.problem import Problem
from bytescale.planner.search.pipeline import levelled_plan
from bytescale.planner.search.pipeline_candidate import PipelineCandidate, chunk_cut, kept_gradient_share

_NUM_CHUNKS = (4, 8, 6, 2)
"""Most chunks of a sequence; the first is where the search starts."""

_HORIZONS = (0.8, 1.0, 0.65, 0.5)
"""Most time of a sequence, waiting included, as shares of the step of the best plan of whole sequences."""

_PACK_SHARES = (0.25, 0.125, 0.5, 0.06)
_BUBBLES = (1.0, 0.5, 0.25)
_CUT_POWERS = (1.0, 0.85, 0.7)
_RANK_SHARES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Tokens of a whole sequence on a rank, as multiples of C, that are tried."""


@dataclass(frozen=True)
class _ChunkCandidate:
    """One candidate of the search, before it is known what each sequence does; shares as in the tables above."""

    most_chunks: int = _NUM_CHUNKS[0]
    horizon: float = _HORIZONS[0]
    pack: float = _PACK_SHARES[0]
    bubble: float = _BUBBLES[0]
    num_leading: int = 0


def plan_chunked(problem: Problem, whole: StepPlan) -> StepPlan:
    """The plan with the shortest step found; at worst `whole`, which is predicted, and without a pipeline always it."""
    best = whole
    if problem.pp_size == 1:
        return best
    assert whole.predicted is not None
    whole_s = best_s = whole.predicted.step_time_s
    start = _ChunkCandidate(num_leading=problem.pp_size - 1)
    size = (problem.num_sequences + problem.hdp_size) * problem.pp_size
    allowed = 5 if size > 400_000 else 12 if size > 100_000 else 40
    seen: set[bytes] = set()

    def tries(candidates: list[_ChunkCandidate]) -> None:
        nonlocal start, best, best_s
        for candidate in candidates:
            sequences = _pipeline_candidate(problem, candidate, whole_s)
            if len(seen) >= allowed or sequences.key in seen:
                continue
            seen.add(sequences.key)
            levelled = levelled_plan(problem, sequences, "chunked")
            if levelled is not None and levelled.step_s < best_s * (1 - 1e-6):
                start, best, best_s = candidate, levelled.plan, levelled.step_s

    tries([replace(start, most_chunks=num, horizon=horizon) for num in _NUM_CHUNKS for horizon in _HORIZONS])
    tries([replace(start, pack=pack) for pack in _PACK_SHARES])
    tries([replace(start, bubble=bubble) for bubble in _BUBBLES[1:]])
    tries([replace(start, num_leading=num) for num in (0, 1, problem.pp_size)])
    levelled = levelled_plan(problem, _pipeline_candidate(problem, start, whole_s), "chunked", rounds=4)
    if levelled is not None and levelled.step_s < best_s:
        best = levelled.plan
    return best


def _pipeline_candidate(problem: Problem, candidate: _ChunkCandidate, whole_s: float) -> PipelineCandidate:
    horizon_s = candidate.horizon * whole_s
    degree, num_chunks, power = choose_chunks(problem, candidate.most_chunks, horizon_s, candidate.bubble)
    pack_tokens = min(piece_limit(problem, candidate.most_chunks), max(1, int(problem.fixed_capacity * candidate.pack)))
    return PipelineCandidate(degree, pack_tokens, candidate.num_leading, num_chunks, power, candidate.bubble)


def choose_chunks(
    problem: Problem, most_chunks: int, horizon_s: float, bubble: float
) -> tuple[IntArray, IntArray, FloatArray]:
    """Degree, number of chunks and power of the cuts of every sequence."""
    lengths, capacity = problem.lengths, problem.fixed_capacity
    limit = piece_limit(problem, most_chunks)
    degree, num_chunks, cut_power = np.ones_like(lengths), np.ones_like(lengths), np.ones(len(lengths))
    rows = np.flatnonzero(lengths > limit)
    if not len(rows):
        return degree, num_chunks, cut_power
    s = lengths[rows][:, None]
    table = [(share, n, power) for share in _RANK_SHARES for n in range(1, most_chunks + 1) for power in _CUT_POWERS]
    shares, num, power = (np.array(column)[None, :] for column in zip(*table, strict=True))
    ranks = np.clip(np.ceil(s / (shares * capacity)).astype(np.int64), 1, problem.hdp_size)
    chunks = _chunks_of(problem, s, ranks, num, power)
    ends_s = chunks.total_s + (problem.pp_size - 1) * chunks.longest_s
    work = ranks * (chunks.total_s + bubble * (problem.pp_size - 1) * chunks.longest_s)
    # Where nothing meets the horizon the earliest end counts.
    score = np.where(ends_s <= horizon_s, work, work.max() * (1 + ends_s / horizon_s))
    # Every rank must have a token of every chunk.
    legal = (chunks.most_tokens <= limit) & ((num == 1) | (chunks.least_tokens >= 1))
    chosen = np.where(legal, score, np.inf).argmin(axis=1)
    degree[rows], num_chunks[rows] = ranks[np.arange(len(rows)), chosen], num[0, chosen]
    cut_power[rows] = power[0, chosen]
    return degree, num_chunks, cut_power


def piece_limit(problem: Problem, most_chunks: int) -> int:
    """Tokens a micro-batch may have so that all in flight fit: most_chunks + P - 1 of them in P * C tokens."""
    share = 1 + kept_gradient_share(problem.cost)
    room = problem.pp_size * problem.fixed_capacity / (share * (most_chunks + problem.pp_size - 1))
    return max(1, min(problem.fixed_capacity, int(room)))


@dataclass(frozen=True)
class _Chunks:
    """The chunks of every sequence (rows) under every choice (columns).

    Attributes:
        total_s, longest_s: time of all of them, and of the longest, on the fullest stage.
        most_tokens, least_tokens: of a piece of any of them.
    """

    total_s: FloatArray
    longest_s: FloatArray
    most_tokens: IntArray
    least_tokens: IntArray


def _chunks_of(problem: Problem, s: IntArray, ranks: IntArray, num: IntArray, power: FloatArray) -> _Chunks:
    total_s, longest_s = np.zeros(ranks.shape), np.zeros(ranks.shape)
    most, least = np.zeros(ranks.shape, np.int64), np.full(ranks.shape, np.iinfo(np.int64).max)
    ratio = np.full(ranks.shape, problem.fixed_ratio)
    for i in range(int(num.max())):
        begin, end = chunk_cut(s, i, num, power), chunk_cut(s, i + 1, num, power)
        part_s = np.where(i < num, stage_time_s(problem, end - begin, ranks, ratio, begin), 0.0)
        total_s, longest_s = total_s + part_s, np.maximum(longest_s, part_s)
        most = np.maximum(most, ceil_div(end - begin, ranks))
        least = np.where(i < num, np.minimum(least, (end - begin) // ranks), least)
    return _Chunks(total_s, longest_s, most, least)
