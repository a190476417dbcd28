"""Order of execution: gangs of micro-batches, 1F1B per stage, and the proof that no operation waits for itself.

Micro-batches that share a sequence exchange keys and values while they run, so they run at the same time: they form a
**gang** (a connected component). A plan can be executed if and only if the graph below has no cycle; the validator, the
planner, the simulator and the runtime all take the order from here.

Nodes are (gang, stage, forward | backward). Edges are (1) the order of operations on each (rank, stage), which is 1F1B
over that rank's own micro-batches, (2) F(g, s) -> F(g, s+1) and B(g, s+1) -> B(g, s). Without a pipeline forward and
backward of a micro-batch are neighbours, so the graph shrinks to one node a gang. The argument needs sends that do not
block: only a receive waits.

A sequence run as **chunks** (plan layout `chunks`) keeps the keys and values of its earlier chunks, and its gradients
reach them, so its micro-batches form one **unit**: its backwards run in reverse order, and every stage runs enough
extra warm-up forwards for the longest unit of the plan to be complete when its first backward is due.

Cost: O((micro-batches) * pp_size) nodes and edges, numpy only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bytescale.arrays import FloatArray, IntArray, exclusive_sum
from bytescale.plan.graph import connected_components
from bytescale.plan.step_plan import StepPlan

FORWARD, BACKWARD = 0, 1


class Operation(NamedTuple):
    """One direction (FORWARD or BACKWARD) of a rank's micro-batch, by number, on one stage."""

    micro_batch: int
    direction: int


@dataclass(frozen=True)
class Gangs:
    """Micro-batches grouped into gangs.

    Attributes:
        gang: gang number of each micro-batch (global micro-batch id as in `StepPlan.micro_batch_ids`). Shape [M].
        rank: rank of each micro-batch. Shape [M].
        num_gangs: gangs are numbered 0..num_gangs-1 by their lowest micro-batch id.
    """

    gang: IntArray
    rank: IntArray
    num_gangs: int


def gangs_of(plan: StepPlan) -> Gangs:
    """Group the micro-batches of `plan` into gangs."""
    counts = plan.num_micro_batches()
    total = int(counts.sum())
    rows, _ = plan.sequence_rows()
    ids = plan.micro_batch_ids()[rows]
    same = plan.pieces.sequence[rows][1:] == plan.pieces.sequence[rows][:-1]
    if plan.layout == "chunks":
        assert plan.pieces.token_begin is not None
        same &= plan.pieces.token_begin[rows][1:] == plan.pieces.token_begin[rows][:-1]
    roots = connected_components(total, ids[:-1][same], ids[1:][same])
    unique, gang = np.unique(roots, return_inverse=True)
    return Gangs(gang=gang.astype(np.int64), rank=np.repeat(np.arange(plan.hdp_size), counts), num_gangs=len(unique))


def one_f_one_b(
    num_micro_batches: int,
    pp_size: int,
    stage: int,
    unit_sizes: Sequence[int] | None = None,
    longest_unit: int = 1,
) -> list[Operation]:
    """Operations of one stage in 1F1B order.

    Warm-up forwards, then one forward and one backward in turn, then the remaining backwards. With `pp_size` 1 this is
    F0 B0 F1 B1 ... Units run their backwards reversed, so the warm-up is longer by what the longest one needs.

    Args:
        num_micro_batches: micro-batches of this rank.
        pp_size: stages.
        stage: 0 is the first.
        unit_sizes: micro-batches of each unit, in order; None makes every micro-batch a unit.
        longest_unit: largest unit of the whole plan; all ranks warm up by it, or gangs could wait for each other in a
            circle.
    """
    columns = _one_f_one_b(num_micro_batches, pp_size, stage, unit_sizes, longest_unit)
    return [Operation(*row) for row in columns.tolist()]


def _one_f_one_b(
    num_micro_batches: int, pp_size: int, stage: int, unit_sizes: Sequence[int] | None, longest_unit: int
) -> IntArray:
    """What `one_f_one_b` returns, as columns. Shape [2 * num_micro_batches, 2]."""
    warm_up = min(pp_size - stage - 1 + longest_unit - 1, num_micro_batches)
    number = np.arange(num_micro_batches)
    backwards = number
    if unit_sizes is not None:
        sizes = np.asarray(unit_sizes, np.int64)
        begins = exclusive_sum(sizes)
        backwards = np.repeat(2 * begins + sizes - 1, sizes) - number
    # Behind the warm-up forwards take every second place while there are any.
    is_forward = np.zeros(2 * num_micro_batches, dtype=bool)
    is_forward[np.where(number < warm_up, number, 2 * number - warm_up)] = True
    order = np.empty((2 * num_micro_batches, 2), np.int64)
    order[is_forward, 0], order[is_forward, 1] = number, FORWARD
    order[~is_forward, 0], order[~is_forward, 1] = backwards, BACKWARD
    return order


def unit_sizes_of(plan: StepPlan) -> list[tuple[int, ...]]:
    """Sizes of the units of every rank, in order: micro-batches joined by a sequence that runs in chunks."""
    counts = plan.num_micro_batches()
    if plan.layout != "chunks":
        ones = {int(n): (1,) * int(n) for n in np.unique(counts)}
        return [ones[n] for n in counts.tolist()]
    ids, sequence = plan.micro_batch_ids(), plan.pieces.sequence
    rows = np.lexsort((ids, sequence, plan.pieces.rank))
    joined = (np.diff(sequence[rows]) == 0) & (np.diff(plan.pieces.rank[rows]) == 0) & (np.diff(ids[rows]) == 1)
    begins = np.ones(int(counts.sum()) + 1, dtype=bool)
    begins[ids[rows][1:][joined]] = False
    first = np.flatnonzero(begins)
    at = np.searchsorted(first, np.concatenate([[0], np.cumsum(counts)]))
    sizes = np.diff(first).tolist()
    return [tuple(sizes[low:high]) for low, high in zip(at[:-1].tolist(), at[1:].tolist(), strict=True)]


def rank_order(plan: StepPlan, rank: int, stage: int) -> list[Operation]:
    """Operations of one rank and stage, as `one_f_one_b` gives them."""
    sizes = unit_sizes_of(plan)
    longest = max((size for own in sizes for size in own), default=1)
    return one_f_one_b(sum(sizes[rank]), plan.pp_size, stage, sizes[rank], longest)


def forward_order(plan: StepPlan, rank: int) -> list[Operation]:
    """Operations of one rank, on every stage, where nothing runs backwards: those of `rank_order` without the rest.

    A plan that can be executed can be executed so, even where a send waits until the next stage has received what was
    sent before: whatever waits then, waits for an earlier gang or for the same one on an earlier stage.
    """
    return [Operation(number, FORWARD) for number in range(int(plan.num_micro_batches()[rank]))]


def stage_orders(plan: StepPlan) -> Iterator[tuple[IntArray, int, IntArray]]:
    """The order of operations of every rank and stage, ranks with the same order together.

    Yields:
        ranks, stage, and the operations as (micro_batch, FORWARD | BACKWARD), shape [num_operations, 2]. Ranks without
        a micro-batch are left out.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    longest = 1
    for rank, sizes in enumerate(unit_sizes_of(plan)):
        if sizes:
            alike.setdefault(sizes, []).append(rank)
            longest = max(longest, *sizes)
    for sizes, ranks in alike.items():
        for stage in range(plan.pp_size):
            yield np.array(ranks), stage, _one_f_one_b(sum(sizes), plan.pp_size, stage, sizes, longest)


def most_in_flight(plan: StepPlan, values: FloatArray) -> FloatArray:
    """Largest sum of `values`, one a micro-batch, between forward and backward. Shape [hdp_size, pp_size]."""
    counts = plan.num_micro_batches()
    first = exclusive_sum(counts)
    most = np.zeros((plan.hdp_size, plan.pp_size))
    for ranks, stage, order in stage_orders(plan):
        change = values[first[ranks][:, None] + order[:, 0]] * np.where(order[:, 1] == FORWARD, 1.0, -1.0)
        most[ranks, stage] = np.cumsum(change, axis=1).max(axis=1)
    return most


def operation_edges(plan: StepPlan, gangs: Gangs) -> tuple[int, IntArray, IntArray]:
    """The operation graph as (number of nodes, from, to).

    Without a pipeline node = gang. With one, node = (gang * pp_size + stage) * 2 + direction.
    """
    counts = plan.num_micro_batches()
    first = np.concatenate([[0], np.cumsum(counts)])
    if plan.pp_size == 1:
        neighbours = gangs.rank[1:] == gangs.rank[:-1]
        return gangs.num_gangs, gangs.gang[:-1][neighbours], gangs.gang[1:][neighbours]
    pp = plan.pp_size
    sources: list[IntArray] = []
    targets: list[IntArray] = []
    for ranks, stage, order in stage_orders(plan):
        nodes = (gangs.gang[first[ranks][:, None] + order[:, 0]] * pp + stage) * 2 + order[:, 1]
        sources.append(nodes[:, :-1].ravel())
        targets.append(nodes[:, 1:].ravel())
    forward = np.arange(gangs.num_gangs)[:, None] * pp + np.arange(pp)[None, :]
    forward = forward * 2 + FORWARD
    sources += [forward[:, :-1].ravel(), forward[:, 1:].ravel() + 1, forward[:, -1]]
    targets += [forward[:, 1:].ravel(), forward[:, :-1].ravel() + 1, forward[:, -1] + 1]
    return gangs.num_gangs * pp * 2, np.concatenate(sources), np.concatenate(targets)
