"""What a micro-batch costs in one layer: all of its rings advance together, as the runtime runs them.

Step j of every sequence of a micro-batch is one exchange and one batch of kernels. With block_i the attention block of
a piece, bytes_i its keys and values and D_i its degree, one layer and direction takes

    linear + sum_i block_i + sum over j = 1 .. max(D) - 1 of
        max( sum over D_i > j of block_i,   latency + sum over D_i > j of bytes_i / bandwidth_i,   floor )

so 700 short sequences cut over 256 ranks pay 255 steps, not 700 times as many. A micro-batch of one sequence costs
`model.piece_times_s`, rounding aside. A chunk of tokens [b, e) of a sequence attends to all keys up to its own end:
its block is that of (e - b) / D queries and (b + e) / D keys, and e / D keys and values travel. An offload copy is
exposed where it is longer than the layer that hides it.

With the head exchange of Ulysses u = gcd(D, heads) ranks of a sequence exchange queries, keys, values and outputs, each
then has 1 / u of the heads over u times the edge, and D / u such groups form a ring:

    exchange = 4 latencies + (u - 1) / u of their bytes / bandwidth, once forward, twice backward; nothing hides it.

Keys and values are sent as often as needed where there are fewer KV heads than u.

Invariant: compute + communication + copy is the time of the layer, and no less than the sum of the degree-1 times.
Cost: O(pieces), plus a sort over the distinct degrees of each micro-batch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bytescale.arrays import BoolArray, FloatArray, IntArray
from bytescale.cost.model import CostModel, DirectionCost, ModelShape
from bytescale.plan.step_plan import StepPlan

Attention = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class Ulysses:
    """What the head exchange needs beyond the cost model, per GPU.

    Attributes:
        num_heads, num_kv_heads: of a rank; the first says how far a sequence can be spread by heads alone.
        query_bytes_per_token: queries and outputs of one token in one layer.
    """

    num_heads: int
    num_kv_heads: int
    query_bytes_per_token: float


def head_exchange(model: ModelShape, tp_size: int = 1) -> Ulysses:
    """Of a model whose heads are shared by `tp_size` GPUs."""
    query_bytes = 2 * model.num_heads * model.head_dim * model.dtype_bytes
    return Ulysses(max(1, model.num_heads // tp_size), max(1, model.num_kv_heads // tp_size), query_bytes / tp_size)


@dataclass(frozen=True)
class LayerTimes:
    """Times of every micro-batch in one layer and direction, without the constant g and the head. All of shape [M].

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
    """Distinct degrees of each micro-batch, ascending, and sums over the pieces of that degree or a higher one.

    Attributes:
        micro_batch: of each level. All of shape [num_levels].
        num_steps: ring steps that this level runs beyond the one below.
        square: sum of edge * (edge + e0), the attention of a step in units of a.
        wire_s: sum of what the keys and values of a piece take on their link, per transfer.
        latency_s: of a step.
    """

    micro_batch: IntArray
    num_steps: FloatArray
    square: FloatArray
    wire_s: FloatArray
    latency_s: FloatArray


def ring_times(plan: StepPlan, cost: CostModel, ulysses: Ulysses | None = None) -> tuple[LayerTimes, LayerTimes]:
    """Forward and backward of every micro-batch of a plan in zig-zag pieces; recomputation counts in the backward.

    Args:
        plan: the plan.
        cost: what pieces cost.
        ulysses: sequences exchange heads as far as these divide evenly, and pass the rest round; None passes all.
    """
    pieces = plan.pieces
    degree = pieces.cp_degree
    assert degree is not None
    ids, num = plan.micro_batch_ids(), int(plan.num_micro_batches().sum())
    edge, area_edge, kept_edge = _edges(plan, degree)
    spread = np.ones_like(degree) if ulysses is None else np.gcd(degree, ulysses.num_heads)
    copies = np.ones(len(degree)) if ulysses is None else np.maximum(1.0, spread / ulysses.num_kv_heads)
    in_ring = degree // spread
    square = edge * (area_edge * spread + cost.block_half_tokens)
    tokens, area = _sums(ids, edge, num), _sums(ids, in_ring * square, num)
    levels, exchange_s = None, np.zeros(num)
    if cost.has_communication and np.any(degree > 1):
        crosses = _crosses_nodes(plan, cost)
        across = degree > cost.ranks_per_node if crosses is None else crosses
        if np.any(in_ring > 1):
            levels = _levels(cost, ids, in_ring, across, kept_edge * copies, square)
        if ulysses is not None:
            num_bytes = edge * (ulysses.query_bytes_per_token + copies * cost.kv_bytes_per_token)
            exchange_s = _exchange_s(cost, ids, spread, across, num_bytes, num)
    copying_s = _copying_s(plan, cost, ids, edge, num)
    forward = _direction(cost, cost.forward, tokens, area, levels, exchange_s)
    backward = _direction(cost, cost.backward, tokens, area, levels, 2 * exchange_s)
    if cost.recompute:
        backward = (backward[0] + forward[0], backward[1] + forward[1], backward[2] + forward[2])
    times = []
    for compute_s, communication_s, transfer_s in (forward, backward):
        copy_s = np.maximum(0.0, copying_s - compute_s - communication_s)
        times.append(LayerTimes(compute_s, communication_s, copy_s, transfer_s, copying_s))
    return times[0], times[1]


def _edges(plan: StepPlan, degree: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per rank of every piece: its queries, the keys of its attention block, and the keys and values that travel."""
    pieces = plan.pieces
    if pieces.token_begin is None or pieces.token_end is None:
        edge = plan.lengths[pieces.sequence] / degree
        return edge, edge, edge
    begin, end = pieces.token_begin, pieces.token_end
    return (end - begin) / degree, (begin + end) / degree, end / degree


def _direction(
    cost: CostModel,
    direction: DirectionCost,
    tokens: FloatArray,
    area: FloatArray,
    levels: _Levels | None,
    exchange_s: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Compute, exposed communication and busy link of every micro-batch."""
    compute_s = direction.token_s * tokens + direction.square_s * area
    if levels is None:
        return compute_s, exchange_s, exchange_s
    transfer = direction.transfer * levels.wire_s + levels.latency_s
    waiting = np.maximum(0.0, np.maximum(transfer, cost.ring_step_floor_s) - direction.square_s * levels.square)
    num = len(compute_s)
    exposed_s = _sums(levels.micro_batch, levels.num_steps * waiting, num)
    return compute_s, exposed_s + exchange_s, _sums(levels.micro_batch, levels.num_steps * transfer, num) + exchange_s


def _exchange_s(
    cost: CostModel, ids: IntArray, spread: IntArray, across: BoolArray, num_bytes: FloatArray, num: int
) -> FloatArray:
    """All-to-all of the heads of every micro-batch; what stays on a rank is not sent, and latency counts once."""
    bandwidth = np.where(across, cost.inter_node.bytes_per_s, cost.intra_node.bytes_per_s)
    wire_s = _sums(ids, num_bytes * (spread - 1) / spread / bandwidth, num)
    latency_s = np.zeros(num)
    np.maximum.at(latency_s, ids, np.where(across, cost.inter_node.latency_s, cost.intra_node.latency_s) * (spread > 1))
    return wire_s + 4 * latency_s


def _levels(
    cost: CostModel, ids: IntArray, degree: IntArray, across: BoolArray, kept_edge: FloatArray, square: FloatArray
) -> _Levels:
    """Levels of rings of `degree` members each; one argument a piece."""
    rows = np.flatnonzero(degree > 1)
    degree, across = degree[rows], across[rows]
    stride = int(degree.max()) + 1
    key = ids[rows] * stride + degree
    # Runs of equal keys first: static plans have millions of rows and one run a micro-batch.
    new = np.concatenate([[True], key[1:] != key[:-1]])
    begin = np.flatnonzero(new)
    distinct, level = np.unique(key[begin], return_inverse=True)
    micro_batch, level_degree = distinct // stride, distinct % stride
    first = np.concatenate([[True], micro_batch[1:] != micro_batch[:-1]])
    below = np.where(first, 1, np.concatenate([[1], level_degree[:-1]]))

    def sums(values: FloatArray | BoolArray) -> FloatArray:
        per_run = np.add.reduceat(values, begin, dtype=np.float64)
        return _at_or_above(_sums(level, per_run, len(distinct)), micro_batch)

    bandwidth = np.where(across, cost.inter_node.bytes_per_s, cost.intra_node.bytes_per_s)
    latency_s = np.where(sums(across) > 0.5, cost.inter_node.latency_s, cost.intra_node.latency_s)
    wire_s = sums(cost.kv_bytes_per_token * kept_edge[rows] / bandwidth)
    num_steps = (level_degree - below).astype(np.float64)
    return _Levels(micro_batch, num_steps, sums(square[rows]), wire_s, latency_s)


def _sums(index: IntArray, values: FloatArray | BoolArray, num: int) -> FloatArray:
    return np.asarray(np.bincount(index, weights=values, minlength=num), np.float64)


def _at_or_above(values: FloatArray, micro_batch: IntArray) -> FloatArray:
    """For each level the sum over it and the higher levels of its micro-batch."""
    after = np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])
    last = np.searchsorted(micro_batch, micro_batch, side="right")
    alone = last == np.arange(len(values)) + 1
    # Differences of running sums would round; a level without higher ones keeps its own value exactly.
    return np.where(alone, values, after[:-1] - after[last])


def _copying_s(plan: StepPlan, cost: CostModel, ids: IntArray, edge: FloatArray, num: int) -> FloatArray:
    ratio = plan.pieces.offload_ratio
    if not np.any(ratio > 0):
        return np.zeros(num)
    num_bytes = ratio * (cost.activation_bytes_per_token * edge + cost.activation_bytes)
    return _sums(ids, num_bytes, num) / cost.copy_bytes_per_s


def _crosses_nodes(plan: StepPlan, cost: CostModel) -> BoolArray | None:
    """Of every piece, whether its sequence lies on several nodes; None where both links are equal."""
    pieces = plan.pieces
    if not len(pieces) or cost.intra_node == cost.inter_node:
        return None
    rows, begin = plan.sequence_rows()
    node = pieces.rank[rows] // cost.ranks_per_node
    first, last = np.minimum.reduceat(node, begin[:-1]), np.maximum.reduceat(node, begin[:-1])
    return np.asarray((first != last)[pieces.sequence])
