"""`flexsp`: groups of different powers of two side by side, chosen so that the slowest ends soonest (FlexSP).

The batch, sorted by length, is cut into micro-batches that all ranks together can hold; several numbers of them are
tried. For each micro-batch the published system solves a mixed-integer programme: which sizes of groups exist, with at
most R ranks together, and which sequences each runs, so that the longest time of a group is least; a sequence's time on
a group is additive, and memory is C tokens a rank. Sequences of similar length count as equal, to keep it small.

Ours is the same programme, solved by bisection on the longest time: under a guess, longest first, sequences fill the
narrowest groups with room in time and memory, and else open groups of the least size that meets the guess. No solver
is needed; the answer is not proven optimal. With a pipeline, which the source lacks, groups are stacked.

Invariant: a sequence counts as the longest of its bucket, so neither time nor memory is underestimated. Cost:
O(tries * micro-batches * bisections * buckets) numpy steps, and a sort.
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import group_time_s, sequence_time_s
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.rows import Placed, plan_of_units, spread
from bytescale.planner.problem import Problem, too_long

NUM_TRIES = 3
"""Numbers of micro-batches tried, from the fewest that memory allows."""

CLOSE_ENOUGH = 0.01
"""Bisection stops where the slowest group is this close to the least guess that may still be met."""

_MAX_BUCKETS = 16


@dataclass(frozen=True)
class Buckets:
    """Sequences of similar length, longest first, and what one takes on a group of each size.

    Attributes:
        counts: sequences of each bucket. Shape [B].
        sizes: powers of two below R, and R. Shape [K].
        work_s, tokens: of a rank for one sequence. Shape [K, B].
    """

    counts: IntArray
    sizes: IntArray
    work_s: FloatArray
    tokens: IntArray


@dataclass(frozen=True)
class Groups:
    """Groups of one micro-batch.

    Attributes:
        size: ranks of each.
        of_sequence: group of each sequence, in the order of the buckets.
        longest_s: time of the slowest.
    """

    size: IntArray
    of_sequence: IntArray
    longest_s: float


def plan_flexsp(problem: Problem) -> StepPlan:
    """Plan with the number of micro-batches whose longest times add up to least.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    order = np.argsort(-problem.lengths, kind="stable")
    micro_batches = _least_sum(problem, problem.lengths[order])
    unit = np.zeros(problem.num_sequences, dtype=np.int64)
    sizes = [groups.size for groups in micro_batches]
    first = np.cumsum([0, *(len(size) for size in sizes)])
    unit[order] = np.concatenate([g.of_sequence + at for g, at in zip(micro_batches, first, strict=False)])
    degree = np.concatenate(sizes)
    if problem.pp_size == 1:
        placed = _one_after_another(sizes, hdp_size)
    else:
        time_s = group_time_s(problem, problem.lengths, unit, degree, problem.fixed_ratio)
        placed = stack_gangs(degree, hdp_size, time_s)
    return plan_of_units(problem, "flexsp", unit=unit, degree=degree, placed=placed, offload_ratio=problem.fixed_ratio)


def _least_sum(problem: Problem, lengths: IntArray) -> list[Groups]:
    """The micro-batches of the best of a few numbers of them; `lengths` fall."""
    num = max(1, -(-int(lengths.sum()) // (problem.fixed_capacity * problem.hdp_size)))
    best: list[Groups] = []
    best_s, tries = float("inf"), 0
    while tries < NUM_TRIES and num <= len(lengths):
        micro_batches = _cut_and_solve(problem, lengths, num, best_s)
        if micro_batches is not None:
            best, best_s = micro_batches, sum(groups.longest_s for groups in micro_batches)
        tries += bool(best)
        num += 1 if best else max(1, num // 10)
    # One sequence alone always fits.
    return best or [groups for s in lengths for groups in _cut_and_solve(problem, np.array([s]), 1) or []]


def _cut_and_solve(problem: Problem, lengths: IntArray, num: int, below_s: float = float("inf")) -> list[Groups] | None:
    """Cut falling lengths into `num` runs of about equal tokens and solve each.

    None where one does not fit, or all together take `below_s` or more.
    """
    end = np.cumsum(lengths)
    run = np.minimum((end - lengths / 2) * num / end[-1], num - 1).astype(np.int64)
    solved = []
    for part in np.split(lengths, np.flatnonzero(np.diff(run)) + 1):
        groups = solve_micro_batch(buckets_of(problem, part), problem.fixed_capacity)
        if groups is None:
            return None
        solved.append(groups)
        below_s -= groups.longest_s
        if below_s <= 0:
            return None
    return solved


def buckets_of(problem: Problem, lengths: IntArray) -> Buckets:
    """Buckets of falling lengths: one for each length while those are few, else of about equal tokens."""
    change = np.diff(lengths) != 0
    if int(change.sum()) >= _MAX_BUCKETS:
        change = np.diff(np.cumsum(lengths) * _MAX_BUCKETS // int(lengths.sum() + 1)) != 0
    begin = np.concatenate([[0], np.flatnonzero(change) + 1])
    longest = lengths[begin]
    hdp_size = problem.hdp_size
    sizes = np.append(1 << np.arange((hdp_size - 1).bit_length()), hdp_size).astype(np.int64)
    rows, columns = np.broadcast_arrays(sizes[:, None], longest[None])
    ratio = np.full(rows.size, problem.fixed_ratio)
    work_s = sequence_time_s(problem, columns.ravel(), rows.ravel(), ratio).reshape(rows.shape)
    return Buckets(np.diff(np.append(begin, len(lengths))), sizes, work_s, -(-columns // rows))


def solve_micro_batch(buckets: Buckets, capacity: int) -> Groups | None:
    """Groups whose longest time is least, as far as bisection finds it; None where the ranks do not hold them."""
    best = fill_groups(buckets, capacity, float("inf"))
    if best is None:
        return None
    work = float((buckets.work_s * buckets.sizes[:, None]).min(axis=0) @ buckets.counts)
    low = max(float(buckets.work_s.min(axis=0).max()), work / float(buckets.sizes[-1]))
    while best.longest_s > low * (1 + CLOSE_ENOUGH):
        guess = (low + best.longest_s) / 2
        groups = fill_groups(buckets, capacity, guess)
        if groups is None:
            low = guess
        else:
            best = groups
    return best


def fill_groups(buckets: Buckets, capacity: int, most_s: float) -> Groups | None:
    """Groups that all end within `most_s`, or None where more than all ranks would be needed."""
    by_memory = capacity // buckets.tokens
    alone = np.minimum(most_s / buckets.work_s * (1 + 1e-12), by_memory).astype(np.int64)  # of a kind in one group
    if not (alone > 0).any(axis=0).all():
        return None
    least_kind: list[int] = (alone > 0).argmax(axis=0).tolist()
    free = int(buckets.sizes[-1])
    kind = np.zeros(0, dtype=np.int64)
    busy_s, tokens = np.zeros(0), np.zeros(0, dtype=np.int64)
    of_sequence: list[IntArray] = []
    for b, count in enumerate(buckets.counts.tolist()):
        work, size, k = buckets.work_s[:, b], buckets.tokens[:, b], least_kind[b]
        room = np.minimum((most_s - busy_s) / work[kind] * (1 + 1e-12), (capacity - tokens) // size[kind])
        fits = np.maximum(room, 0).astype(np.int64)
        short = count - int(fits.sum())
        if short > 0:
            most = int(alone[k, b])
            num = -(-short // most)
            free -= num * int(buckets.sizes[k])
            if free < 0:
                return None
            kind = np.append(kind, [k] * num)
            busy_s, tokens = np.append(busy_s, [0.0] * num), np.append(tokens, [0] * num)
            fits = np.append(fits, [most] * num)
        narrow_first = np.argsort(kind, kind="stable")
        in_order = fits[narrow_first]
        taken = np.empty_like(fits)
        taken[narrow_first] = np.clip(count - in_order.cumsum() + in_order, 0, in_order)
        busy_s, tokens = busy_s + taken * work[kind], tokens + taken * size[kind]
        of_sequence.append(np.repeat(np.arange(len(kind)), taken))
    return Groups(buckets.sizes[kind], np.concatenate(of_sequence), float(busy_s.max()))


def _one_after_another(sizes: list[IntArray], hdp_size: int) -> Placed:
    """Micro-batch after micro-batch, in each the groups from the widest to the narrowest on neighbouring ranks."""
    counts = np.zeros(hdp_size, dtype=np.int64)
    ranks, micro_batches = [], []
    for size in sizes:
        widest_first = np.argsort(-size, kind="stable")
        begin = np.zeros_like(size)
        begin[widest_first] = np.cumsum(size[widest_first]) - size[widest_first]
        group, index = spread(size)
        members = begin[group] + index
        ranks.append(members)
        micro_batches.append(counts[members])
        counts[members] += 1
    return Placed(np.concatenate(ranks), np.concatenate(micro_batches), counts)
