"""What a micro-batch costs in one layer: all of its rings advance together, as the runtime runs them.

Step j of every sequence of a micro-batch is one exchange and one batch of kernels. With block_i the attention block of
a piece, bytes_i its keys and values and D_i its degree, one layer and direction takes

    linear + sum_i block_i + sum over j = 1 .. max(D) - 1 of
        max( sum over D_i > j of block_i,   latency + sum over D_i > j of bytes_i / bandwidth_i,   floor )

so 700 short sequences cut over 256 ranks pay 255 steps, not 700 times as many. A micro-batch of one sequence costs
`model.piece_times_s`. An offload copy is exposed where it is longer than the layer that hides it.

Invariant: compute + communication + copy is the time of the layer, and no less than the sum of the degree-1 times.
Cost: O(pieces), plus a sort over the distinct degrees of each micro-batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale.cost.model import CostModel, DirectionCost
from bytescale.plan import StepPlan

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LayerTimes:
    """Of every micro-batch, in one layer and direction, the constant g and the head excluded. All of shape [M].

    Attributes:
        compute_s: kernels.
        communication_s: what ring steps take beyond their compute.
        copy_s: offload copies beyond compute and communication.
        transfer_s: how long the P2P link is busy.
        copying_s: how long the copy engine is busy.
    """

    compute_s: FloatArray
    communication_s: FloatArray
    copy_s: FloatArray
    transfer_s: FloatArray
    copying_s: FloatArray

    @property
    def total_s(self) -> FloatArray:
        return self.compute_s + self.communication_s + self.copy_s


@dataclass(frozen=True)
class _Levels:
    """Distinct degrees of each micro-batch, ascending: `row_level` of each piece with a degree above 1."""

    rows: IntArray
    row_level: IntArray
    micro_batch: IntArray
    num_steps: FloatArray


def ring_times(plan: StepPlan, cost: CostModel) -> tuple[LayerTimes, LayerTimes]:
    """Forward and backward of every micro-batch of a zig-zag plan; recomputation counts in the backward."""
    levels = _levels(plan)
    crosses = _crosses_nodes(plan, cost)
    copying_s = _copying_s(plan, cost)
    forward = _direction(plan, cost, cost.forward, levels, crosses)
    backward = _direction(plan, cost, cost.backward, levels, crosses)
    if cost.recompute:
        backward = (backward[0] + forward[0], backward[1] + forward[1], backward[2] + forward[2])
    times = []
    for compute_s, communication_s, transfer_s in (forward, backward):
        copy_s = np.maximum(0.0, copying_s - compute_s - communication_s)
        times.append(LayerTimes(compute_s, communication_s, copy_s, transfer_s, copying_s))
    return times[0], times[1]


def _levels(plan: StepPlan) -> _Levels:
    degree = plan.pieces.cp_degree
    assert degree is not None
    rows = np.flatnonzero(degree > 1)
    stride = int(degree.max(initial=1)) + 1
    key = plan.micro_batch_ids()[rows] * stride + degree[rows]
    # Runs of equal keys first: static plans have millions of rows and one run a micro-batch.
    new = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.zeros(0, bool)
    run = np.cumsum(new) - 1
    distinct, level_of_run = np.unique(key[new], return_inverse=True)
    micro_batch, level_degree = distinct // stride, distinct % stride
    below = np.concatenate([[1], level_degree[:-1]]) if len(distinct) else level_degree
    first = np.concatenate([[True], micro_batch[1:] != micro_batch[:-1]]) if len(distinct) else np.zeros(0, bool)
    num_steps = (level_degree - np.where(first, 1, below)).astype(np.float64)
    return _Levels(rows, level_of_run[run], micro_batch, num_steps)


def _direction(
    plan: StepPlan, cost: CostModel, direction: DirectionCost, levels: _Levels, crosses: BoolArray | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Compute, exposed communication and busy link of every micro-batch."""
    pieces = plan.pieces
    degree = pieces.cp_degree
    assert degree is not None
    ids, num = plan.micro_batch_ids(), int(plan.num_micro_batches().sum())
    edge = plan.lengths[pieces.sequence] / degree
    block_s = direction.square_s * edge * (edge + cost.block_half_tokens)
    compute_s = _sums(ids, direction.token_s * edge + degree * block_s, num)
    nothing = np.zeros(num)
    if not cost.has_communication or not len(levels.rows):
        return compute_s, nothing, nothing
    rows, num_levels = levels.rows, len(levels.micro_batch)
    across = degree[rows] > cost.ranks_per_node if crosses is None else crosses[rows]
    num_bytes = direction.transfer * cost.kv_bytes_per_token * edge[rows]
    wire_s = num_bytes / np.where(across, cost.inter_node.bytes_per_s, cost.intra_node.bytes_per_s)
    block, wire, num_across = (
        _at_or_above(_sums(levels.row_level, values, num_levels), levels) for values in (block_s[rows], wire_s, across)
    )
    transfer = wire + np.where(num_across > 0.5, cost.inter_node.latency_s, cost.intra_node.latency_s)
    waiting = np.maximum(0.0, np.maximum(transfer, cost.ring_step_floor_s) - block)
    communication_s = _sums(levels.micro_batch, levels.num_steps * waiting, num)
    return compute_s, communication_s, _sums(levels.micro_batch, levels.num_steps * transfer, num)


def _sums(index: IntArray, values: FloatArray | BoolArray, num: int) -> FloatArray:
    return np.asarray(np.bincount(index, weights=values, minlength=num), np.float64)


def _at_or_above(values: FloatArray, levels: _Levels) -> FloatArray:
    """For each level the sum over it and the higher levels of its micro-batch."""
    after = np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])
    last = np.searchsorted(levels.micro_batch, levels.micro_batch, side="right")
    alone = last == np.arange(len(values)) + 1
    # Differences of running sums would round; a level without higher ones keeps its own value exactly.
    return np.where(alone, values, after[:-1] - after[last])


def _copying_s(plan: StepPlan, cost: CostModel) -> FloatArray:
    pieces = plan.pieces
    num = int(plan.num_micro_batches().sum())
    if not np.any(pieces.offload_ratio > 0):
        return np.zeros(num)
    assert pieces.cp_degree is not None
    edge = plan.lengths[pieces.sequence] / pieces.cp_degree
    num_bytes = pieces.offload_ratio * (cost.activation_bytes_per_token * edge + cost.activation_bytes)
    return _sums(plan.micro_batch_ids(), num_bytes, num) / cost.copy_bytes_per_s


def _crosses_nodes(plan: StepPlan, cost: CostModel) -> BoolArray | None:
    """Of every piece, whether its sequence lies on several nodes; None where both links are equal."""
    pieces = plan.pieces
    if not len(pieces) or cost.intra_node == cost.inter_node:
        return None
    rows, begin = plan.sequence_rows()
    node = pieces.rank[rows] // cost.ranks_per_node
    first, last = np.minimum.reduceat(node, begin[:-1]), np.maximum.reduceat(node, begin[:-1])
    return np.asarray((first != last)[pieces.sequence])
