"""Candidates of `best` with a pipeline: stacked gangs, levelled packs, short micro-batches at both ends.

A pipeline of P stages waits about (P - 1) first forwards and (P - 1) last backwards, and wherever neighbouring
micro-batches differ. So every rank may begin with a few of its shortest packs (as many on all ranks, which keeps every
gang at one micro-batch number), then runs its gangs widest first, then its other packs, longest first. Smaller packs
make the ends cheaper and pay the constant g more often: how many tokens a pack holds is searched as well.

The makespan of every candidate is computed with the operation graph, so what is compared is what is predicted.
Cost: a Python step a gang and a (rank, stage) for each candidate; the number of candidates is fixed.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.cost.makespan import makespan
from bytescale.cost.model import CostModel
from bytescale.cost.predict import durations
from bytescale.plan import StepPlan
from bytescale.planner.assemble import plan_of_groups, spread
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
from bytescale.validate import in_flight_tokens

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_PACK_SHARES = (0.25, 0.06, 0.125, 0.5, 1.0)
"""Tokens of a pack as shares of what a rank holds; the first is where the search starts."""

_PACK_TIMES = (2.0, 1.0, 0.5, 0.7, 0.35, 1.3)
"""Most time of a gang, in times of a full pack: what is longer than its neighbours makes every stage wait."""


LEVELLING_ROUNDS = 1
"""How often a candidate is levelled again by the waiting its timeline shows; more gain little (docs/log.md)."""


@dataclass(frozen=True)
class Shape:
    """One candidate.

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


def best_pipeline_plan(problem: Problem) -> StepPlan:
    """The candidate with the shortest step: first the degrees, then the pack size, then the leading packs."""
    size = (problem.num_sequences + problem.hdp_size) * problem.pp_size
    allowed = 3 if size > 200_000 else 6 if size > 40_000 else 20
    least = least_work_degrees(problem).degree
    sizes = [max(1, int(problem.fixed_capacity * share)) for share in _PACK_SHARES]
    shape = Shape(least, sizes[0], problem.pp_size - 1)
    best = levelled_plan(problem, shape)
    assert best is not None  # whole sequences always fit

    def tries(shapes: list[Shape]) -> None:
        nonlocal shape, best, allowed
        for candidate in shapes:
            if allowed <= 1:
                return
            allowed -= 1
            made = levelled_plan(problem, candidate)
            if made is not None and best is not None and made.step_s < best.step_s * (1 - 1e-6):
                shape, best = candidate, made

    tries([replace(shape, degree=degree) for degree in _degree_candidates(problem, least)])
    tries([replace(shape, degree=power_of_two(shape.degree, problem.hdp_size))])
    tries([replace(shape, pack_tokens=tokens) for tokens in sizes[1:]])
    tries([replace(shape, num_leading=num) for num in (0, 1)])
    return best.plan


@dataclass(frozen=True)
class LevelledPlan:
    """A plan, its predicted step, and how long each rank waits in it until it is done. Shape [hdp_size]."""

    plan: StepPlan
    step_s: float
    waiting_s: FloatArray


def levelled_plan(
    problem: Problem, shape: Shape, strategy: str = "best", rounds: int = LEVELLING_ROUNDS
) -> LevelledPlan | None:
    """The plan of one candidate, its short sequences placed again by the waiting that its timeline shows.

    How long a rank waits for other stages and gangs follows from the whole plan; `shape.bubble` only guesses it. So the
    plan is timed, and sequences of one rank are levelled once more with the waiting found, `rounds` times.

    Returns:
        The best of the plans made; None where its chunks, or what it keeps of them, do not fit.
    """
    best: LevelledPlan | None = None
    waiting_s: FloatArray | None = None
    for _ in range(rounds + 1):
        made = stacked_plan(problem, shape, strategy, waiting_s)
        if made.layout == "chunks" and not _fits(problem, made):
            break
        timed = _timed(problem, made)
        if best is None or timed.step_s < best.step_s * (1 - 1e-6):
            best = timed
        waiting_s = timed.waiting_s if waiting_s is None else (waiting_s + timed.waiting_s) / 2
    return best


def _fits(problem: Problem, made: StepPlan) -> bool:
    """Whether every piece fits alone, and what is in flight fits together; packs are never larger than they may be."""
    if made.pieces.tokens.max() > problem.fixed_capacity:
        return False
    return bool(in_flight_tokens(made).max() <= problem.pp_size * problem.tokens_per_rank)


def _timed(problem: Problem, made: StepPlan) -> LevelledPlan:
    times = durations(made, problem.cost, problem.rank_speed)
    line = makespan(made, times.forward_s, times.backward_s)
    ends = line.end_s.reshape(line.gangs.num_gangs, -1).max(axis=1)[line.gangs.gang]
    end_s, busy_s = np.zeros(made.hdp_size), np.zeros((made.hdp_size, made.pp_size))
    np.maximum.at(end_s, line.gangs.rank, ends)
    np.add.at(busy_s, line.gangs.rank, times.forward_s + times.backward_s)
    return LevelledPlan(made, line.step_time_s, end_s - busy_s.max(axis=1))


def _degree_candidates(problem: Problem, least: IntArray) -> list[IntArray]:
    """Degrees that keep a gang's time below so many times that of a full pack."""
    full = np.array([problem.fixed_capacity])
    pack_s = float(stage_time_s(problem, full, np.ones_like(full), np.array([problem.fixed_ratio]))[0])
    found = {least.tobytes(): least}
    for times in _PACK_TIMES:
        degree = widen(problem, least, pack_s * times)
        found.setdefault(degree.tobytes(), degree)
    return list(found.values())[1:]


def stacked_plan(
    problem: Problem, shape: Shape, strategy: str = "best", waiting_s: FloatArray | None = None
) -> StepPlan:
    """The plan of one candidate.

    Args:
        problem: what is asked.
        shape: the candidate.
        strategy: name that the plan carries.
        waiting_s: how long each rank waits in the same plan without it; None estimates it by `shape.bubble`.
    """
    lengths, hdp_size, degree = problem.lengths, problem.hdp_size, shape.degree
    chunked = np.zeros(len(lengths), dtype=bool) if shape.num_chunks is None else shape.num_chunks > 1
    alone = (degree > 1) | chunked | (lengths > problem.fixed_capacity)
    gangs, singles = np.flatnonzero(alone), np.flatnonzero(~alone)
    # Gangs of several ranks first: where they sit does not depend on the rest.
    gangs = gangs[np.argsort(degree[gangs] == 1, kind="stable")]
    num_wide = int((degree[gangs] > 1).sum())
    parts = _parts(problem, gangs, shape)
    wait_s = shape.bubble * (problem.pp_size - 1) * parts.longest_s
    wide = slice(0, num_wide)
    ranks, gang_numbers, gang_counts = stack_gangs(
        degree[gangs][wide], hdp_size, parts.gang_s[wide], parts.num[wide], wait_s[wide]
    )
    busy = np.bincount(ranks, weights=np.repeat(parts.gang_s[wide], degree[gangs][wide]), minlength=hdp_size)
    if waiting_s is None:
        waiting_s = np.zeros(hdp_size)
        np.maximum.at(waiting_s, ranks, np.repeat(wait_s[wide], degree[gangs][wide]))
    alone_rank, room = fill_rooms(parts.gang_s[num_wide:], -busy - waiting_s, problem.rank_speed)
    alone_number, gang_counts = _queue(alone_rank, parts.gang_s[num_wide:], parts.num[num_wide:], gang_counts)
    ranks, gang_numbers = np.append(ranks, alone_rank), np.append(gang_numbers, alone_number)
    fixed = np.full(len(singles), problem.fixed_ratio)
    single_s = sequence_time_s(problem, lengths[singles], np.ones_like(singles), fixed)
    share_s = micro_batch_s(problem) * lengths[singles] / shape.pack_tokens
    chosen, _ = fill_rooms(single_s + share_s, room, problem.rank_speed)
    # A sequence longer than a pack fills one alone.
    pack = first_fit_in_segments(chosen, np.minimum(lengths[singles], shape.pack_tokens), shape.pack_tokens)
    stride = int(pack.max(initial=0)) + 1
    unit, which = np.unique(chosen * stride + pack, return_inverse=True)
    unit_s = np.bincount(which, weights=single_s, minlength=len(unit)).astype(np.float64)
    numbers, num_leading = _pack_numbers(unit // stride, unit_s, gang_counts, shape.num_leading)
    row, chunk_row = _rows_of_chunks(degree[gangs], parts.num)
    columns: dict[str, Any] = {}
    if shape.num_chunks is not None:
        zero = np.zeros(len(singles), np.int64)
        columns["chunk"] = (np.append(parts.begin, zero), np.append(parts.end, lengths[singles]))
        columns["kept_gradient_share"] = kept_gradient_share(problem.cost)
    return plan_of_groups(
        problem,
        strategy,
        sequence=np.concatenate([gangs[parts.gang], singles]),
        degree=np.concatenate([degree[gangs][parts.gang], np.ones(len(singles), np.int64)]),
        ranks=np.concatenate([ranks[row], chosen]),
        micro_batches=np.concatenate([gang_numbers[row] + chunk_row + num_leading, numbers[which]]),
        offload_ratio=np.concatenate([parts.ratio[parts.gang], fixed]),
        **columns,
    )


def _queue(rank: IntArray, time_s: FloatArray, num: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """First micro-batch of each unit behind what its rank has, longest first, and the counts after them."""
    order = np.lexsort((-time_s, rank))
    running = np.cumsum(num[order]) - num[order]
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


def _parts(problem: Problem, gangs: IntArray, shape: Shape) -> _Parts:
    lengths, degree = problem.lengths[gangs], shape.degree[gangs]
    num = np.ones_like(gangs) if shape.num_chunks is None else shape.num_chunks[gangs]
    gang, index = spread(num)
    power = np.ones(len(gangs)) if shape.cut_power is None else shape.cut_power[gangs]
    begin, end = (chunk_cut(lengths[gang], i, num[gang], power[gang]) for i in (index, index + 1))
    if shape.num_chunks is None:
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
    first = np.cumsum(degree) - degree
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
    position[shortest] = np.arange(len(rank)) - np.repeat(np.cumsum(per_rank) - per_rank, per_rank)
    count = per_rank[rank]
    # With fewer than two packs a leading one, the shortest lead and the rest follow.
    spaced = 2 * num_leading <= count
    leads = np.where(spaced, (position % 2 == 1) & (position < 2 * num_leading), position < num_leading)
    lead_number = np.where(spaced, position // 2, position)
    followers_below = np.where(spaced, position - np.minimum((position + 1) // 2, num_leading), position - num_leading)
    tail_number = gang_counts[rank] + num_leading + (count - num_leading - 1 - followers_below)
    return np.where(leads, lead_number, tail_number), num_leading
