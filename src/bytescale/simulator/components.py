"""What every micro-batch spends its time on: kernels, exposed communication, exposed offload copies.

The totals are those of `bytescale.cost.predict`, so the simulator cannot disagree with the planner; this module splits
them. The planner counts with rings; here attention may exchange heads instead (`bytescale.cost.micro_batch`).
Invariant: compute + tensor + communication + copy = total, each at least 0 up to rounding. Cost: O(pieces), numpy.
"""

from dataclasses import dataclass, replace

import numpy as np

from bytescale.arrays import FloatArray
from bytescale.cost.micro_batch import LayerTimes, Ulysses, ring_times
from bytescale.cost.model import CostModel, Link
from bytescale.cost.predict import durations, stage_durations, stage_layers
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan


@dataclass(frozen=True)
class Components:
    """Times of each micro-batch on each stage, per direction (index 0 forward, 1 backward). All of [2, M, pp_size].

    Attributes:
        total_s: own time of the micro-batch, waiting excluded.
        tensor_s: collectives of tensor parallelism.
        communication_s: attention communication that no compute hides.
        copy_s: offload copies that nothing hides.
        transfer_s: how long the P2P link of a rank is busy, hidden or not.
        copying_s: how long its copy engine is busy: D2H forward, H2D backward.
    """

    total_s: FloatArray
    tensor_s: FloatArray
    communication_s: FloatArray
    copy_s: FloatArray
    transfer_s: FloatArray
    copying_s: FloatArray

    @property
    def compute_s(self) -> FloatArray:
        return self.total_s - self.tensor_s - self.communication_s - self.copy_s


def components(
    plan: StepPlan, cost: CostModel, *, rank_speed: FloatArray | None = None, ulysses: Ulysses | None = None
) -> Components:
    """Split the times of every micro-batch of `plan`.

    Args:
        plan: any plan.
        cost: the cost model.
        rank_speed: relative speed of each rank; None takes all as equal.
        ulysses: attention exchanges heads instead of passing keys and values round a ring.

    Raises:
        UserError: heads for a plan of layout `blocks`.
    """
    if plan.layout != "blocks":
        return _on_stages(plan, cost, ring_times(plan, cost, ulysses), rank_speed)
    if ulysses is not None:
        raise UserError("the plan has blocks on any rank: there is no group that could exchange heads")
    total = durations(plan, cost, rank_speed)
    totals_s = np.stack([total.forward_s, total.backward_s])
    free = Link(0.0, float("inf"))
    alone = durations(plan, replace(cost, intra_node=free, inter_node=free, ring_step_floor_s=0.0), rank_speed)
    exposed_s = totals_s - np.stack([alone.forward_s, alone.backward_s])
    nothing = np.zeros_like(totals_s)
    tensor_s = _tensor_s(plan, cost, _scale(plan, cost, rank_speed))
    return Components(totals_s, tensor_s, exposed_s, nothing, exposed_s, nothing)


def _on_stages(
    plan: StepPlan, cost: CostModel, times: tuple[LayerTimes, LayerTimes], rank_speed: FloatArray | None
) -> Components:
    """From one layer to the layers of each stage."""
    forward, backward = times
    total = stage_durations(plan, cost, forward.total_s, backward.total_s, rank_speed)
    scale = _scale(plan, cost, rank_speed)

    def both(name: str) -> FloatArray:
        return np.stack([getattr(one, name)[:, None] * scale for one in times])

    return Components(
        total_s=np.stack([total.forward_s, total.backward_s]),
        tensor_s=_tensor_s(plan, cost, scale),
        communication_s=both("communication_s"),
        copy_s=both("copy_s"),
        transfer_s=both("transfer_s"),
        copying_s=both("copying_s"),
    )


def _scale(plan: StepPlan, cost: CostModel, rank_speed: FloatArray | None) -> FloatArray:
    """What one layer of each micro-batch counts for on each stage. [M, pp_size]."""
    counts = plan.num_micro_batches()
    layers = stage_layers(cost, plan.pp_size).astype(np.float64)
    scale = np.broadcast_to(layers, (int(counts.sum()), plan.pp_size))
    return scale if rank_speed is None else scale / np.repeat(rank_speed, counts)[:, None]


def _tensor_s(plan: StepPlan, cost: CostModel, scale: FloatArray) -> FloatArray:
    """Collectives of tensor parallelism, a part of what is linear in tokens; recomputation counts in the backward."""
    tokens = np.bincount(plan.micro_batch_ids(), weights=plan.pieces.tokens, minlength=len(scale))[:, None]
    forward_s = tokens * cost.forward.tensor_token_s * scale
    backward_s = tokens * cost.backward.tensor_token_s * scale
    return np.stack([forward_s, backward_s + forward_s if cost.recompute else backward_s])
