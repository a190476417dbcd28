"""`flexsp`: groups of different powers of two side by side, chosen so that the slowest ends soonest (FlexSP).

The batch, sorted by length, is cut into micro-batches that all ranks together can hold; several numbers of them are
tried. For each micro-batch the published system solves a mixed-integer programme: which sizes of groups exist, with at
most R ranks together, and which sequences each runs, so that the longest time of a group is least; a sequence's time on
a group is additive, and memory is C tokens a rank. Sequences of similar length count as equal, to keep it small.

Ours is the same programme, solved by bisection on the longest time: under a guess, longest first, sequences fill the
narrowest groups with room in time and memory, and else open groups of the least size that meets the guess. No solver
is needed; the answer is not proven optimal. With a pipeline, which the source lacks, groups are stacked.

Invariant: a sequence counts as the longest of its bucket, so neither time nor memory is underestimated. Cost:
O(bisections * buckets) numpy steps over the groups of all micro-batches of all tries, and a sort.

Shapes: M micro-batches, B buckets, K sizes, G groups.
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import BoolArray, FloatArray, IntArray, exclusive_sum
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
    """Sequences of similar length of each micro-batch, longest first, and what one takes on a group of each size.

    Attributes:
        counts: sequences of each bucket; 0 where a micro-batch has fewer buckets than others. Shape [M, B].
        sizes: powers of two below R, and R. Shape [K].
        work_s, tokens: of a rank for one sequence. Shape [B, M, K].
    """

    counts: IntArray
    sizes: IntArray
    work_s: FloatArray
    tokens: IntArray

    def rows(self, chosen: IntArray) -> "Buckets":
        """Those of some micro-batches."""
        return Buckets(self.counts[chosen], self.sizes, self.work_s[:, chosen], self.tokens[:, chosen])


@dataclass(frozen=True)
class Groups:
    """Groups of every micro-batch, narrow ones first.

    Attributes:
        longest_s: time of the slowest; infinite where the ranks do not hold the micro-batch. Shape [M].
        kind: index of the size of each group; -1 where there is none. Shape [G, M].
        taken: sequences of each bucket in each group. Shape [B, G, M].
    """

    longest_s: FloatArray
    kind: IntArray
    taken: IntArray

    def rows(self, chosen: IntArray) -> "Groups":
        """Those of some micro-batches."""
        return Groups(self.longest_s[chosen], self.kind[:, chosen], self.taken[:, :, chosen])

    def put(self, rows: IntArray, others: "Groups") -> None:
        """Replace those of `rows`."""
        self.longest_s[rows], self.kind[:, rows], self.taken[:, :, rows] = others.longest_s, others.kind, others.taken


def plan_flexsp(problem: Problem) -> StepPlan:
    """Plan with the number of micro-batches whose longest times add up to least.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    order = np.argsort(-problem.lengths, kind="stable")
    buckets, groups = _least_sum(problem, problem.lengths[order])
    micro_batch, slot = np.nonzero(groups.kind.T >= 0)
    degree = buckets.sizes[groups.kind[slot, micro_batch]]
    number = np.full(groups.kind.T.shape, -1, dtype=np.int64)
    number[micro_batch, slot] = np.arange(len(degree))
    unit = np.zeros(problem.num_sequences, dtype=np.int64)
    # Sequences of a bucket go through its groups in turn.
    taken = groups.taken.transpose(2, 0, 1)
    unit[order] = np.repeat(np.broadcast_to(number[:, None], taken.shape).ravel(), taken.ravel())
    if problem.pp_size == 1:
        placed = _one_after_another(degree, micro_batch, hdp_size)
    else:
        time_s = group_time_s(problem, problem.lengths, unit, degree, problem.fixed_ratio)
        placed = stack_gangs(degree, hdp_size, time_s)
    return plan_of_units(problem, "flexsp", unit=unit, degree=degree, placed=placed, offload_ratio=problem.fixed_ratio)


def _least_sum(problem: Problem, lengths: IntArray) -> tuple[Buckets, Groups]:
    """The micro-batches of the best of a few numbers of them; `lengths` fall."""
    num = max(1, -(-int(lengths.sum()) // (problem.fixed_capacity * problem.hdp_size)))
    held: list[IntArray] = []
    while len(held) < NUM_TRIES and num <= len(lengths):
        cuts = [cut_evenly(lengths, n) for n in range(num, num + NUM_TRIES)]
        buckets, begins = _buckets_of_cuts(problem, lengths, cuts)
        fits = np.isfinite(np.add.reduceat(fill_groups(buckets, problem.fixed_capacity).longest_s, begins))
        held += [cut for cut, fit in zip(cuts, fits, strict=True) if fit]
        num += NUM_TRIES if held else max(NUM_TRIES, num // 10)
    # One sequence alone always fits.
    cuts = held[:NUM_TRIES] or [np.arange(len(lengths))]
    buckets, begins = _buckets_of_cuts(problem, lengths, cuts)
    groups = solve_micro_batches(buckets, problem.fixed_capacity, begins)
    best = int(np.add.reduceat(groups.longest_s, begins).argmin())
    rows = begins[best] + np.arange(int(cuts[best][-1]) + 1)
    return buckets.rows(rows), groups.rows(rows)


def _buckets_of_cuts(problem: Problem, lengths: IntArray, cuts: list[IntArray]) -> tuple[Buckets, IntArray]:
    """Buckets of the micro-batches of several cuts, one after another, and the first micro-batch of each cut."""
    begins = exclusive_sum(np.array([int(cut[-1]) + 1 for cut in cuts]))
    together = np.concatenate([cut + begin for cut, begin in zip(cuts, begins, strict=True)])
    return buckets_of(problem, np.tile(lengths, len(cuts)), together), begins


def cut_evenly(lengths: IntArray, num: int) -> IntArray:
    """Micro-batch of each sequence, numbered without gaps: at most `num` runs of about equal tokens."""
    end = np.cumsum(lengths)
    run = np.minimum((end - lengths / 2) * num / end[-1], num - 1).astype(np.int64)
    return np.cumsum(np.diff(run, prepend=run[0]) != 0)


def buckets_of(problem: Problem, lengths: IntArray, micro_batch: IntArray) -> Buckets:
    """Buckets of falling lengths of each micro-batch: one for each length while few, else of about equal tokens."""
    first = np.diff(micro_batch, prepend=-1) != 0
    change = first | (np.diff(lengths, prepend=0) != 0)
    end, total = np.cumsum(lengths), np.bincount(micro_batch, weights=lengths).astype(np.int64)
    share = (end - (np.cumsum(total) - total)[micro_batch]) * _MAX_BUCKETS // (total[micro_batch] + 1)
    many = np.bincount(micro_batch, weights=change)[micro_batch] > _MAX_BUCKETS
    begin = np.flatnonzero(np.where(many, first | (np.diff(share, prepend=0) != 0), change))
    row = micro_batch[begin]
    column = np.arange(len(begin)) - np.searchsorted(row, row)
    shape = (len(total), int(column.max()) + 1)
    counts, longest = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
    counts[row, column] = np.diff(np.append(begin, len(lengths)))
    longest[row, column] = lengths[begin]
    sizes = group_sizes(problem.hdp_size)
    size, s = np.broadcast_arrays(sizes, longest.T[:, :, None])
    work_s = sequence_time_s(problem, s.ravel(), size.ravel(), np.full(s.size, problem.fixed_ratio))
    return Buckets(counts, sizes, work_s.reshape(s.shape), -(-s // size))


def group_sizes(hdp_size: int) -> IntArray:
    """Powers of two below R, and R."""
    return np.append(1 << np.arange((hdp_size - 1).bit_length()), hdp_size).astype(np.int64)


def solve_micro_batches(buckets: Buckets, capacity: int, begins: IntArray) -> Groups:
    """Groups of each micro-batch whose longest time is least, as far as bisection finds it.

    Args:
        buckets: of the micro-batches of all cuts.
        capacity: C.
        begins: first micro-batch of each cut; one that can no longer have the least sum is left as it is.
    """
    best = fill_groups(buckets, capacity)
    counts = buckets.counts.T
    work = ((buckets.work_s * buckets.sizes).min(axis=2) * counts).sum(axis=0)
    longest = np.where(counts > 0, buckets.work_s.min(axis=2), 0.0).max(axis=0)
    low = np.maximum(longest, work / float(buckets.sizes[-1]))
    cut = np.searchsorted(begins, np.arange(len(low)), side="right") - 1
    while True:
        may_win = np.add.reduceat(low, begins) <= np.add.reduceat(best.longest_s, begins).min()
        open_s = np.isfinite(best.longest_s) & (best.longest_s > low * (1 + CLOSE_ENOUGH))
        rows = np.flatnonzero(open_s & may_win[cut])
        if not len(rows):
            return best
        guess = (low[rows] + best.longest_s[rows]) / 2
        found = fill_groups(buckets.rows(rows), capacity, guess, len(best.kind))
        held = np.isfinite(found.longest_s)
        low[rows[~held]] = guess[~held]
        best.put(rows[held], found.rows(held))


def fill_groups(
    buckets: Buckets, capacity: int, most_s: FloatArray | None = None, num_groups: int | None = None
) -> Groups:
    """Groups that all end within a time.

    Args:
        buckets: of the micro-batches.
        capacity: C.
        most_s: the time of each micro-batch; None is no limit. Shape [M].
        num_groups: G; None is as many as there can be.
    """
    counts, sizes = buckets.counts, buckets.sizes
    num, num_buckets = counts.shape
    most_s = np.full(num, np.inf) if most_s is None else most_s
    num_groups = min(int(sizes[-1]), int(counts.sum(axis=1).max())) if num_groups is None else num_groups
    # Of a kind, sequences that fit a group alone.
    alone = np.minimum(np.floor(most_s[:, None] / buckets.work_s * (1 + 1e-12)), capacity // buckets.tokens)
    held: BoolArray = ((alone > 0).any(axis=2) | (counts.T == 0)).all(axis=0)
    least_kind = (alone > 0).argmax(axis=2)
    # Longer sequences open groups no narrower than shorter ones do, so slots from the last one on are in order.
    row, slot = np.arange(num), np.arange(num_groups)[:, None]
    kind = np.full((num_groups, num), -1, dtype=np.int64)
    busy_s, room_tokens = np.zeros(kind.shape), np.zeros(kind.shape)
    at = row * len(sizes) + np.maximum(kind, 0)  # in a bucket's table of work and tokens
    first, free = np.full(num, num_groups), np.full(num, int(sizes[-1]))
    taken = np.zeros((num_buckets, num_groups, num), dtype=np.int64)
    room = np.zeros(kind.shape)
    for b in range(num_buckets):
        count, opened_kind = counts[:, b], least_kind[b]
        work_s, tokens = buckets.work_s[b], buckets.tokens[b]
        used = slice(int(first.min()), None)
        by_time = (most_s - busy_s[used]) / work_s.take(at[used]) * (1 + 1e-12)
        room[used] = np.floor(np.maximum(np.minimum(by_time, room_tokens[used] / tokens.take(at[used])), 0.0))
        most = np.maximum(alone[b, row, opened_kind], 1.0)
        opened = np.ceil(np.maximum(count - room[used].sum(axis=0), 0.0) / most).astype(np.int64)
        free = free - opened * sizes[opened_kind]
        held &= free >= 0
        opened = np.where(held, opened, 0)
        g, m = np.nonzero((slot < first) & (slot >= first - opened))
        first = first - opened
        kind[g, m], room_tokens[g, m], room[g, m] = opened_kind[m], capacity, most[m]
        at[g, m] += opened_kind[m]
        used = slice(int(first.min()), None)
        end = room[used].cumsum(axis=0)
        part = np.minimum(np.maximum(count - end + room[used], 0.0), room[used])
        busy_s[used] += part * work_s.take(at[used])
        room_tokens[used] -= part * tokens.take(at[used])
        taken[b, used] = part
    return Groups(np.where(held, busy_s.max(axis=0), np.inf), kind, taken)


def _one_after_another(degree: IntArray, micro_batch: IntArray, hdp_size: int) -> Placed:
    """Micro-batch after micro-batch, in each the groups from the widest to the narrowest on neighbouring ranks.

    Args:
        degree: of each group, narrow ones first in each micro-batch.
        micro_batch: of each group, ascending.
        hdp_size: R.
    """
    behind = np.cumsum(degree[::-1])[::-1] - degree  # ranks of all groups after it
    last = np.searchsorted(micro_batch, micro_batch, side="right") - 1
    group, index = spread(degree)
    ranks = (behind - behind[last])[group] + index
    counts = np.bincount(ranks, minlength=hdp_size)
    # Ranks used are the lowest in every micro-batch; a rank counts those that use it.
    order = np.lexsort((micro_batch[group], ranks))
    numbers = np.zeros_like(ranks)
    numbers[order] = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Placed(ranks, numbers, counts)
