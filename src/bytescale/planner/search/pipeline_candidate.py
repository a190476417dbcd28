"""One candidate of a pipeline plan: gangs stacked, sequences of one rank levelled, packs at both ends.

Every rank may begin with a few of its shortest packs, as many on all ranks, which keeps every gang at one micro-batch
number (`parts.levels`); then come its gangs, widest first, then chunked or long sequences of its own, then
its other packs, longest first. A gang whose sequence runs in chunks takes neighbouring micro-batches.

Invariant: the order of operations has no cycle. Cost: a Python step a gang, numpy for the rest.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.cost.model import CostModel
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import micro_batch_s, ratio_at, sequence_time_s, stage_time_s
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.list_scheduling import fill_rooms
from bytescale.planner.parts.micro_batches import first_fit_in_segments
from bytescale.planner.parts.rows import Placed, plan_of_groups, spread
from bytescale.planner.problem import Problem


@dataclass(frozen=True)
class PipelineCandidate:
    """Degrees, packs and chunks that give one plan.

    Attributes:
        degree: of each sequence.
        pack_tokens: most tokens of a pack.
        num_leading: packs that every rank runs before its gangs.
        num_chunks: of each sequence; None runs all whole.
        cut_power: chunk i of n of each sequence begins at s * (i / n) ** power; None is 1, equal tokens.
        bubble: how much of the stages' wait for its longest micro-batch counts as load of a rank, 0..1.
    """

    degree: IntArray
    pack_tokens: int
    num_leading: int
    num_chunks: IntArray | None = None
    cut_power: FloatArray | None = None
    bubble: float = 0.0

    @property
    def key(self) -> bytes:
        """Equal for candidates that give the same plan."""
        columns = (self.degree, self.num_chunks, self.cut_power)
        scalars = np.array([self.pack_tokens, self.num_leading, self.bubble])
        return b"".join(c.tobytes() for c in (*columns, scalars) if c is not None)


def stacked_plan(
    problem: Problem, candidate: PipelineCandidate, strategy: str = "best", waiting_s: FloatArray | None = None
) -> StepPlan:
    """The plan of one candidate.

    Args:
        problem: what is asked.
        candidate: which.
        strategy: name that the plan carries.
        waiting_s: how long each rank waits in the same plan without it; None estimates it by `candidate.bubble`.
    """
    lengths, degree = problem.lengths, candidate.degree
    chunked = np.zeros(len(lengths), dtype=bool) if candidate.num_chunks is None else candidate.num_chunks > 1
    alone = (degree > 1) | chunked | (lengths > problem.fixed_capacity)
    # Gangs of several ranks first: where they sit does not depend on the rest.
    gangs = np.flatnonzero(alone)
    gangs = gangs[np.argsort(degree[gangs] == 1, kind="stable")]
    singles = np.flatnonzero(~alone)
    parts = _parts(problem, gangs, candidate)
    placed = _place_gangs(problem, candidate, degree[gangs], parts, waiting_s)
    chosen, numbers, num_leading = _place_packs(problem, candidate, singles, placed)
    row, chunk_row = _rows_of_chunks(degree[gangs], parts.num)
    columns: dict[str, Any] = {}
    if candidate.num_chunks is not None:
        columns["chunk"] = (
            np.append(parts.begin, np.zeros(len(singles), np.int64)),
            np.append(parts.end, lengths[singles]),
        )
        columns["kept_gradient_share"] = kept_gradient_share(problem.cost)
    return plan_of_groups(
        problem,
        strategy,
        sequence=np.concatenate([gangs[parts.gang], singles]),
        degree=np.concatenate([degree[gangs][parts.gang], np.ones(len(singles), np.int64)]),
        ranks=np.concatenate([placed.ranks[row], chosen]),
        micro_batches=np.concatenate([placed.micro_batches[row] + chunk_row + num_leading, numbers]),
        offload_ratio=np.concatenate([parts.ratio[parts.gang], np.full(len(singles), problem.fixed_ratio)]),
        **columns,
    )


@dataclass(frozen=True)
class _PlacedGangs(Placed):
    """Where gangs sit (of one in chunks its first micro-batch) and what they leave.

    Attributes:
        room_s: minus the time of each rank so far, waiting included.
    """

    room_s: FloatArray


def _place_gangs(
    problem: Problem, candidate: PipelineCandidate, degree: IntArray, parts: "_Parts", waiting_s: FloatArray | None
) -> _PlacedGangs:
    """Gangs of several ranks, which come first in `degree`, stacked; then those of one rank levelled behind them."""
    num_wide = int((degree > 1).sum())
    wide_degree, wide_s, lone_s = degree[:num_wide], parts.gang_s[:num_wide], parts.gang_s[num_wide:]
    wait_s = candidate.bubble * (problem.pp_size - 1) * parts.longest_s[:num_wide]
    wide = stack_gangs(wide_degree, problem.hdp_size, wide_s, parts.num[:num_wide], wait_s)
    busy_s = np.bincount(wide.ranks, weights=np.repeat(wide_s, wide_degree), minlength=problem.hdp_size)
    if waiting_s is None:
        waiting_s = np.zeros(problem.hdp_size)
        np.maximum.at(waiting_s, wide.ranks, np.repeat(wait_s, wide_degree))
    lone_rank, room_s = fill_rooms(lone_s, -busy_s - waiting_s, problem.rank_speed)
    lone_number, counts = _queue(lone_rank, lone_s, parts.num[num_wide:], wide.counts)
    return _PlacedGangs(
        np.append(wide.ranks, lone_rank), np.append(wide.micro_batches, lone_number), counts, room_s=room_s
    )


def _place_packs(
    problem: Problem, candidate: PipelineCandidate, singles: IntArray, placed: _PlacedGangs
) -> tuple[IntArray, IntArray, int]:
    """Rank and micro-batch of every single sequence, and how many packs lead on every rank."""
    lengths = problem.lengths[singles]
    fixed = np.full(len(singles), problem.fixed_ratio)
    single_s = sequence_time_s(problem, lengths, np.ones_like(singles), fixed)
    share_s = micro_batch_s(problem) * lengths / candidate.pack_tokens
    chosen, _ = fill_rooms(single_s + share_s, placed.room_s, problem.rank_speed)
    # A sequence longer than a pack fills one alone.
    pack = first_fit_in_segments(chosen, np.minimum(lengths, candidate.pack_tokens), candidate.pack_tokens)
    stride = int(pack.max(initial=0)) + 1
    unit, which = np.unique(chosen * stride + pack, return_inverse=True)
    unit_s = np.bincount(which, weights=single_s, minlength=len(unit)).astype(np.float64)
    numbers, num_leading = _pack_numbers(unit // stride, unit_s, placed.counts, candidate.num_leading)
    return chosen, numbers[which], num_leading


def _queue(rank: IntArray, time_s: FloatArray, num: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """First micro-batch of each unit behind what its rank has, longest first, and the counts after them."""
    order = np.lexsort((-time_s, rank))
    running = exclusive_sum(num[order])
    begin = np.searchsorted(rank[order], rank[order])
    numbers = np.zeros_like(rank)
    numbers[order] = counts[rank[order]] + running - running[begin]
    return numbers, counts + np.bincount(rank, weights=num, minlength=len(counts)).astype(np.int64)


@dataclass(frozen=True)
class _Parts:
    """Micro-batches of the gangs: one each, or one a chunk.

    Attributes:
        gang, begin, end: gang and tokens of each part. Shape [num_parts].
        num, gang_s, longest_s, ratio: parts, time, time of the longest part and offload ratio. Shape [num_gangs].
    """

    gang: IntArray
    begin: IntArray
    end: IntArray
    num: IntArray
    gang_s: FloatArray
    longest_s: FloatArray
    ratio: FloatArray


def _parts(problem: Problem, gangs: IntArray, candidate: PipelineCandidate) -> _Parts:
    lengths, degree = problem.lengths[gangs], candidate.degree[gangs]
    num = np.ones_like(gangs) if candidate.num_chunks is None else candidate.num_chunks[gangs]
    gang, index = spread(num)
    power = np.ones(len(gangs)) if candidate.cut_power is None else candidate.cut_power[gangs]
    begin, end = (chunk_cut(lengths[gang], i, num[gang], power[gang]) for i in (index, index + 1))
    if candidate.num_chunks is None:
        ratio = np.minimum(ratio_at(problem, lengths, degree), 1.0)
    else:
        ratio = np.full(len(gangs), problem.fixed_ratio)
    part_s = stage_time_s(problem, end - begin, degree[gang], ratio[gang], begin)
    longest_s = np.zeros(len(gangs))
    np.maximum.at(longest_s, gang, part_s)
    gang_s = np.bincount(gang, weights=part_s, minlength=len(gangs)).astype(np.float64)
    return _Parts(gang, begin, end, num, gang_s, longest_s, ratio)


def chunk_cut(length: IntArray, chunk: IntArray | int, num_chunks: IntArray, power: FloatArray) -> IntArray:
    """Where chunk number `chunk` of `num_chunks` begins; `num_chunks` itself gives the end of the sequence."""
    cut = np.rint(length * np.minimum(chunk / num_chunks, 1.0) ** power)
    return np.asarray(cut, np.int64)


def _rows_of_chunks(degree: IntArray, num: IntArray) -> tuple[IntArray, IntArray]:
    """Pieces of gangs repeated once a chunk: the row of each piece among those of its gang, and its chunk."""
    gang, chunk = spread(num)
    part, index = spread(degree[gang])
    first = exclusive_sum(degree)
    return first[gang[part]] + index, chunk[part]


def kept_gradient_share(cost: CostModel) -> float:
    """fp32 gradients of the keys and values of a token, as a share of its activations (keys and values in 2 bytes)."""
    if cost.activation_bytes_per_token <= 0:
        return 0.0
    return 2 * cost.kv_bytes_per_token / cost.activation_bytes_per_token


def _pack_numbers(rank: IntArray, time_s: FloatArray, gang_counts: IntArray, wanted: int) -> tuple[IntArray, int]:
    """Micro-batch number of every pack, and how many packs lead on every rank.

    Of a rank's packs, counted from the shortest, every second one leads until enough do; the others follow the gangs,
    longest first, so that both ends are short.
    """
    per_rank = np.bincount(rank, minlength=len(gang_counts))
    num_leading = min(wanted, int(per_rank.min()))
    shortest = np.lexsort((time_s, rank))
    position = np.zeros(len(rank), dtype=np.int64)
    position[shortest] = spread(per_rank)[1]
    count = per_rank[rank]
    # With fewer than two packs a leading one, the shortest lead and the rest follow.
    spaced = 2 * num_leading <= count
    leads = np.where(spaced, (position % 2 == 1) & (position < 2 * num_leading), position < num_leading)
    lead_number = np.where(spaced, position // 2, position)
    followers_below = np.where(spaced, position - np.minimum((position + 1) // 2, num_leading), position - num_leading)
    tail_number = gang_counts[rank] + num_leading + (count - num_leading - 1 - followers_below)
    return np.where(leads, lead_number, tail_number), num_leading
