"""What computing and moving a piece costs: the model's shape, the cluster, and the coefficients that follow.

For one layer and one direction (forward or backward) a whole sequence of s tokens on one rank takes

    T(s) = a*s^2 + b*s + g,        Act(s) = p*s + q,

(ByteScale Eq. 3) where a is causal attention and b everything linear in tokens. Attention runs in blocks; a block with
an edge of e tokens reaches the efficiency 1 / (1 + e0 / e), so it costs a*e^2 + a*e0*e. On D ranks e = s / D, and a
rank's ring is

    T_ring(s, D) = (D - 1) * max(block, transfer, floor) + block,      transfer = latency + e * kv_bytes / bandwidth:

the KV of the next step travels while this one is computed, the last step has nothing left to fetch. A pack costs the
sum over its sequences, the constant g once. Offloading a share r of the activations is free while a layer's copy
hides behind a layer's compute; what does not hide is added.

Invariants: times grow with s at fixed D; D * T_ring(s, D) >= T(s), so no degree saves work. Cost: O(1) an element.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bytescale.arrays import FloatArray
from bytescale.errors import UserError

Provenance = Literal["measured", "fitted", "preset"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. Feed-forward layers are gated (three matrices); experts share one `ffn_size`."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 0
    num_active_experts: int = 0
    dtype_bytes: int = 2

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output matrices of one layer."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def linear_flops_per_token(self) -> float:
        """Forward FLOPs of one layer that do not depend on the position of the token; active experts only."""
        ffn = 3 * self.hidden_size * self.ffn_size * max(1, self.num_active_experts)
        router = self.hidden_size * self.num_experts
        return 2.0 * (self.attention_parameters + ffn + router)

    @property
    def attention_flops_per_square(self) -> float:
        """Forward FLOPs of causal attention of one layer, divided by s^2: two products over half the square."""
        return 2.0 * self.num_heads * self.head_dim

    @property
    def head_flops_per_token(self) -> float:
        """Forward FLOPs of the output head, once a model."""
        return 2.0 * self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All parameters, experts included, with untied embeddings."""
        ffn = 3 * self.hidden_size * self.ffn_size * max(1, self.num_experts) + self.hidden_size * self.num_experts
        layer = self.attention_parameters + ffn + 2 * self.hidden_size
        return self.num_layers * layer + 2 * self.hidden_size * self.vocab_size + self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def activation_bytes_per_token(self) -> float:
        """Bytes one layer keeps for the backward, without recomputation: both norms, q, k, v, output, gated MLP."""
        ffn = 4 * self.ffn_size * max(1, self.num_active_experts)
        return float(self.dtype_bytes * (8 * self.hidden_size + 2 * self.num_kv_heads * self.head_dim + ffn))


@dataclass(frozen=True)
class Link:
    """One way between two ranks: latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, num_bytes: Any) -> Any:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class ClusterSpec:
    """What one GPU and its links reach in practice (not peaks).

    Attributes:
        gpus_per_node: GPUs joined by the `intra_node` link.
        linear_flops_per_s: matrix products, per GPU.
        attention_flops_per_s: attention on large blocks, per GPU.
        block_half_tokens: e0, block edge at which attention runs at half its speed.
        ring_step_floor_s: least time of a ring step, launches and synchronisation included.
        layer_overhead_s: constant of a layer and direction, once a micro-batch (g).
        copy_bytes_per_s: slower direction of the offload copies, both directions running.
        memory_bytes: device memory of one GPU.
        host_memory_bytes: memory of the host, a GPU's share of it.
        provenance: where the figures come from.
    """

    name: str
    gpus_per_node: int
    linear_flops_per_s: float
    attention_flops_per_s: float
    block_half_tokens: float
    ring_step_floor_s: float
    layer_overhead_s: float
    intra_node: Link
    inter_node: Link
    copy_bytes_per_s: float
    memory_bytes: float
    host_memory_bytes: float
    backward_linear: float = 2.0
    backward_attention: float = 2.5
    backward_transfer: float = 2.0
    count_head: bool = True
    provenance: Provenance = "preset"


@dataclass(frozen=True)
class DirectionCost:
    """Coefficients of one layer in one direction: a, b, g in seconds, and how often KV-sized messages travel."""

    square_s: float
    token_s: float
    constant_s: float
    transfer: float
    head_token_s: float = 0.0
    embedding_token_s: float = 0.0
    tensor_token_s: float = 0.0
    """of `token_s`, what tensor parallelism's collectives take"""

    @property
    def ends_token_s(self) -> float:
        """What a token costs once a model, outside its layers."""
        return self.embedding_token_s + self.head_token_s


@dataclass(frozen=True)
class CostModel:
    """Coefficients for one model on one kind of rank (a rank is `tp_size` GPUs).

    Attributes:
        num_layers: of the whole model.
        forward, backward: T(s) per layer; `head_token_s` and `embedding_token_s` are per token, once a model.
        block_half_tokens: e0 of the block efficiency.
        kv_bytes_per_token: bytes of K and V of one token in one layer, per GPU.
        activation_bytes_per_token, activation_bytes: p and q of Act(s), per layer and GPU.
        ranks_per_node: ranks joined by `intra_node`; more ranks than that use `inter_node`.
        copy_bytes_per_s: min(B_d2h, B_h2d) of one GPU.
        recompute: activation checkpointing of every layer: the backward runs the forward again.
    """

    name: str
    num_layers: int
    forward: DirectionCost
    backward: DirectionCost
    kv_bytes_per_token: float
    activation_bytes_per_token: float
    intra_node: Link
    inter_node: Link
    activation_bytes: float = 0.0
    block_half_tokens: float = 0.0
    ring_step_floor_s: float = 0.0
    ranks_per_node: int = 8
    copy_bytes_per_s: float = float("inf")
    recompute: bool = False
    provenance: Provenance = "preset"

    @property
    def has_communication(self) -> bool:
        """Whether any transfer or ring step costs time."""
        free = self.intra_node.bytes_per_s == self.inter_node.bytes_per_s == float("inf")
        return not (free and self.inter_node.latency_s == self.intra_node.latency_s == self.ring_step_floor_s == 0)


def cost_model(model: ModelShape, cluster: ClusterSpec, *, tp_size: int = 1, recompute: bool = False) -> CostModel:
    """Coefficients of `model` on `cluster`; a rank is `tp_size` GPUs of one node, see `shared_by`."""
    if tp_size < 1 or cluster.gpus_per_node % tp_size:
        raise UserError(
            f"tp_size is {tp_size}; it must divide the {cluster.gpus_per_node} GPUs of a {cluster.name} node"
        )
    linear_s = model.linear_flops_per_token / cluster.linear_flops_per_s
    square_s = model.attention_flops_per_square / cluster.attention_flops_per_s
    head_s = model.head_flops_per_token / cluster.linear_flops_per_s if cluster.count_head else 0.0
    forward = DirectionCost(square_s, linear_s, cluster.layer_overhead_s, 1.0, head_s)
    backward = DirectionCost(
        square_s * cluster.backward_attention,
        linear_s * cluster.backward_linear,
        cluster.layer_overhead_s * cluster.backward_linear,
        cluster.backward_transfer,
        head_s * cluster.backward_linear,
    )
    alone = CostModel(
        name=f"{model.name} on {cluster.name}",
        num_layers=model.num_layers,
        forward=forward,
        backward=backward,
        kv_bytes_per_token=float(model.kv_bytes_per_token),
        activation_bytes_per_token=model.activation_bytes_per_token,
        intra_node=cluster.intra_node,
        inter_node=cluster.inter_node,
        block_half_tokens=cluster.block_half_tokens,
        ring_step_floor_s=cluster.ring_step_floor_s,
        ranks_per_node=cluster.gpus_per_node,
        copy_bytes_per_s=cluster.copy_bytes_per_s,
        recompute=recompute,
        provenance=cluster.provenance,
    )
    return shared_by(alone, tp_size, model)


def shared_by(cost: CostModel, tp_size: int, model: ModelShape) -> CostModel:
    """The cost of a rank that is `tp_size` GPUs instead of one: they split every matrix, head and activation.

    Tensor parallelism adds, a layer and direction, two gathers of the hidden state of all rows and two sums of it over
    the `intra_node` link ((tp-1)/tp of it each), which nothing hides. The inputs of blocks, which the backward gathers
    again, travel while it computes.
    """
    if tp_size == 1:
        return cost
    hidden_bytes = model.hidden_size * model.dtype_bytes
    tensor_s = 4 * (tp_size - 1) / tp_size * hidden_bytes / cost.intra_node.bytes_per_s

    def shared(direction: DirectionCost) -> DirectionCost:
        return replace(
            direction,
            square_s=direction.square_s / tp_size,
            token_s=direction.token_s / tp_size + tensor_s,
            head_token_s=direction.head_token_s / tp_size,
            embedding_token_s=direction.embedding_token_s / tp_size,
            tensor_token_s=tensor_s,
        )

    return replace(
        cost,
        name=f"{cost.name}, tp {tp_size}",
        forward=shared(cost.forward),
        backward=shared(cost.backward),
        kv_bytes_per_token=cost.kv_bytes_per_token / tp_size,
        activation_bytes_per_token=cost.activation_bytes_per_token / tp_size,
        activation_bytes=cost.activation_bytes / tp_size,
        ranks_per_node=max(1, cost.ranks_per_node // tp_size),
    )


def with_recompute(cost: CostModel, recompute: bool = True) -> CostModel:
    """The same coefficients with activation checkpointing on or off."""
    return replace(cost, recompute=recompute)


def layer_time_s(
    cost: CostModel, direction: DirectionCost, length: Any, degree: Any = 1, crosses: Any = None, before: Any = 0
) -> FloatArray:
    """Time of one rank for its piece of a sequence, in one layer and one direction, without the constant g.

    Args:
        length: s; any shape that broadcasts with `degree`.
        degree: D.
        crosses: whether the ranks lie on several nodes; None assumes the fewest nodes that hold D ranks.
        before: earlier tokens of the sequence whose keys and values the ranks keep, if this is a chunk of it.
    """
    length, degree = np.asarray(length, np.float64), np.asarray(degree, np.float64)
    edge, kept_edge = length / degree, (np.asarray(before, np.float64) + length) / degree
    block_s = direction.square_s * edge * (2 * kept_edge - edge + cost.block_half_tokens)
    linear_s = direction.token_s * edge
    if not cost.has_communication:
        return np.asarray(linear_s + degree * block_s, np.float64)
    if crosses is None:
        crosses = degree > cost.ranks_per_node
    num_bytes = direction.transfer * kept_edge * cost.kv_bytes_per_token
    transfer_s = np.where(crosses, cost.inter_node.time_s(num_bytes), cost.intra_node.time_s(num_bytes))
    step_s = np.maximum(np.maximum(block_s, transfer_s), cost.ring_step_floor_s)
    return np.asarray(linear_s + (degree - 1) * step_s + block_s, np.float64)


def piece_times_s(
    cost: CostModel, length: Any, degree: Any = 1, offload_ratio: Any = 0.0, crosses: Any = None, before: Any = 0
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward time per layer of one rank's piece, exposed offload copies included, g and head excluded."""
    forward_s = layer_time_s(cost, cost.forward, length, degree, crosses, before)
    backward_s = layer_time_s(cost, cost.backward, length, degree, crosses, before)
    if cost.recompute:
        backward_s = backward_s + forward_s
    ratio = np.asarray(offload_ratio, np.float64)
    if np.any(ratio > 0):
        tokens = np.asarray(length, np.float64) / np.asarray(degree, np.float64)
        copy_s = ratio * (cost.activation_bytes_per_token * tokens + cost.activation_bytes) / cost.copy_bytes_per_s
        forward_s = forward_s + np.maximum(0.0, copy_s - forward_s)
        backward_s = backward_s + np.maximum(0.0, copy_s - backward_s)
    return forward_s, backward_s


def constant_s(cost: CostModel) -> tuple[float, float]:
    """The constant g of one layer, forward and backward: paid once by every micro-batch."""
    backward_s = cost.backward.constant_s + (cost.forward.constant_s if cost.recompute else 0.0)
    return cost.forward.constant_s, backward_s


def rank_time_s(
    cost: CostModel, length: Any, degree: Any = 1, offload_ratio: Any = 0.0, num_layers: int | None = None
) -> FloatArray:
    """Forward plus backward of one rank's piece over `num_layers` layers (default: all, with the output head)."""
    forward_s, backward_s = piece_times_s(cost, length, degree, offload_ratio)
    if num_layers is not None:
        return (forward_s + backward_s) * num_layers
    tokens = np.asarray(length, np.float64) / np.asarray(degree, np.float64)
    head_s = (cost.forward.ends_token_s + cost.backward.ends_token_s) * tokens
    return (forward_s + backward_s) * cost.num_layers + head_s
