"""What every micro-batch spends its time on: kernels, exposed communication, exposed offload copies.

The totals are those of `bytescale.cost.predict`, so the simulator cannot disagree with the planner; this module splits
them. Beside the ring of the cost model it knows the all-to-all of Ulysses for plans with one degree: a rank exchanges
its queries, keys, values and outputs for all tokens of a share of the heads,

    D <= H:  4 exchanges of (D - 1) / D of the piece, nothing hides them, one attention kernel over the whole sequence;
    D > H:   H ranks exchange heads and D / H such groups form a ring.

H is the number of query heads of a rank; where it has fewer KV heads, these are sent as often as needed.
Invariant: compute + communication + copy = total, each at least 0 up to rounding. Cost: O(pieces), numpy.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bytescale.arrays import FloatArray, ceil_div
from bytescale.cost.micro_batch import LayerTimes, ring_times
from bytescale.cost.model import CostModel, Link
from bytescale.cost.predict import durations, stage_durations, stage_layers
from bytescale.plan.step_plan import StepPlan

Attention = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class Components:
    """Times of each micro-batch on each stage, per direction (index 0 forward, 1 backward). All of [2, M, pp_size].

    Attributes:
        total_s: own time of the micro-batch, waiting excluded.
        communication_s: attention communication that no compute hides.
        copy_s: offload copies that nothing hides.
        transfer_s: how long the P2P link of a rank is busy, hidden or not.
        copying_s: how long its copy engine is busy: D2H forward, H2D backward.
    """

    total_s: FloatArray
    communication_s: FloatArray
    copy_s: FloatArray
    transfer_s: FloatArray
    copying_s: FloatArray

    @property
    def compute_s(self) -> FloatArray:
        return self.total_s - self.communication_s - self.copy_s


@dataclass(frozen=True)
class Ulysses:
    """What the all-to-all needs beyond the cost model, per GPU.

    Attributes:
        num_heads, num_kv_heads: of a rank; the first says how far a sequence can be spread by heads alone.
        query_bytes_per_token: queries and outputs of one token in one layer.
    """

    num_heads: int
    num_kv_heads: int
    query_bytes_per_token: float


def components(
    plan: StepPlan, cost: CostModel, *, rank_speed: FloatArray | None = None, ulysses: Ulysses | None = None
) -> Components:
    """Split the times of every micro-batch of `plan`.

    Args:
        plan: any plan.
        cost: the cost model.
        rank_speed: relative speed of each rank; None takes all as equal.
        ulysses: attention exchanges heads instead of passing keys and values round a ring.
    """
    if plan.layout != "blocks":
        times = ring_times(plan, cost) if ulysses is None else ulysses_times(plan, cost, ulysses)
        return _on_stages(plan, cost, times, rank_speed)
    total = durations(plan, cost, rank_speed)
    totals_s = np.stack([total.forward_s, total.backward_s])
    free = Link(0.0, float("inf"))
    alone = durations(plan, replace(cost, intra_node=free, inter_node=free, ring_step_floor_s=0.0), rank_speed)
    exposed_s = totals_s - np.stack([alone.forward_s, alone.backward_s])
    nothing = np.zeros_like(totals_s)
    return Components(totals_s, exposed_s, nothing, exposed_s, nothing)


def _on_stages(
    plan: StepPlan, cost: CostModel, times: tuple[LayerTimes, LayerTimes], rank_speed: FloatArray | None
) -> Components:
    """From one layer to the layers of each stage."""
    forward, backward = times
    total = stage_durations(plan, cost, forward.total_s, backward.total_s, rank_speed)
    scale = np.broadcast_to(stage_layers(cost, plan.pp_size).astype(np.float64), total.forward_s.shape)
    if rank_speed is not None:
        scale = scale / np.repeat(rank_speed, plan.num_micro_batches())[:, None]

    def both(name: str) -> FloatArray:
        return np.stack([getattr(one, name)[:, None] * scale for one in times])

    return Components(
        total_s=np.stack([total.forward_s, total.backward_s]),
        communication_s=both("communication_s"),
        copy_s=both("copy_s"),
        transfer_s=both("transfer_s"),
        copying_s=both("copying_s"),
    )


def ulysses_times(plan: StepPlan, cost: CostModel, ulysses: Ulysses) -> tuple[LayerTimes, LayerTimes]:
    """`ring_times` of a plan whose attention exchanges heads; the plan has one degree for all (`static`)."""
    pieces = plan.pieces
    assert pieces.cp_degree is not None
    num, ids = int(plan.num_micro_batches().sum()), plan.micro_batch_ids()
    degree = int(pieces.cp_degree.max(initial=1))
    num_heads = min(degree, ulysses.num_heads)
    num_groups = ceil_div(degree, num_heads)
    length = plan.lengths[pieces.sequence].astype(np.float64)
    edge = length / pieces.cp_degree
    link = cost.intra_node if degree <= cost.ranks_per_node else cost.inter_node
    tokens = np.bincount(ids, weights=edge, minlength=num)
    copies = max(1.0, num_heads / ulysses.num_kv_heads)
    kv_bytes = copies * cost.kv_bytes_per_token
    exchange_s = tokens * (ulysses.query_bytes_per_token + kv_bytes) * (num_heads - 1) / num_heads / link.bytes_per_s
    exchange_s = np.where(tokens > 0, exchange_s + 4 * link.latency_s * (num_heads > 1), 0.0)
    times = []
    for direction, repeats in ((cost.forward, 1.0), (cost.backward, 2.0)):
        # A block of a group: 1 / num_heads of the heads over num_heads times the edge.
        group_edge = edge * num_heads
        block_s = direction.square_s * group_edge * (group_edge + cost.block_half_tokens) / num_heads
        block = np.bincount(ids, weights=block_s, minlength=num)
        wire_s = direction.transfer * kv_bytes * tokens / link.bytes_per_s + link.latency_s
        step_s = np.maximum(block, np.maximum(wire_s, cost.ring_step_floor_s)) if num_groups > 1 else block
        compute_s = direction.token_s * tokens + num_groups * block
        communication_s = (num_groups - 1) * (step_s - block) + repeats * exchange_s
        transfer_s = (num_groups - 1) * wire_s + repeats * exchange_s
        nothing = np.zeros(num)
        columns = (compute_s, communication_s, nothing, transfer_s, nothing)
        times.append(LayerTimes(*(np.asarray(column, np.float64) for column in columns)))
    return times[0], times[1]
