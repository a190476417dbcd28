"""What a simulated step means: throughput, utilisation, and which loss is the largest.

Shares are means over ranks and stages as parts of the step time, so they add to 1:

    compute + communication + copy + gang wait + PP bubble + DP bubble + overheads = 1.

MFU counts the FLOPs of the model alone, 3 * (linear * s + attention * s^2) per sequence from its real length, causal
half, no recomputation, over peak FLOPs of all GPUs. Cost: O(sequences).
"""

from dataclasses import dataclass, fields

import numpy as np

from bytescale.cost.model import ModelShape
from bytescale.plan import StepPlan
from bytescale.simulator.engine import SimulatedStep


@dataclass(frozen=True)
class Shares:
    """Where the time of the mean rank goes, as parts of the step."""

    compute: float
    communication: float
    copy: float
    gang_wait: float
    pp_bubble: float
    dp_bubble: float
    overheads: float


_REASONS = {
    "communication": "exposed communication",
    "copy": "exposed offload copies",
    "gang_wait": "gang waiting",
    "pp_bubble": "PP bubble",
    "dp_bubble": "DP bubble",
    "overheads": "fixed cost of the step",
}


def shares(step: SimulatedStep) -> Shares:
    """Means over all ranks and stages."""
    whole = step.step_time_s
    if whole <= 0:
        return Shares(*(0.0 for _ in fields(Shares)))
    ranks = step.ranks
    return Shares(
        compute=float(ranks.compute_s.mean()) / whole,
        communication=float(ranks.communication_s.mean()) / whole,
        copy=float(ranks.copy_s.mean()) / whole,
        gang_wait=float(ranks.gang_wait_s.mean()) / whole,
        pp_bubble=float(ranks.pp_bubble_s.mean()) / whole,
        dp_bubble=float(ranks.dp_bubble_s.mean()) / whole,
        overheads=(whole - step.makespan_s) / whole,
    )


def main_loss(parts: Shares, least: float = 0.005) -> str:
    """The largest part that is not compute, in words; "none" below `least` of the step."""
    name = max(_REASONS, key=lambda key: float(getattr(parts, key)))
    return _REASONS[name] if getattr(parts, name) >= least else "none"


def tokens_per_s(step: SimulatedStep) -> float:
    """Input tokens a second."""
    return step.plan.num_tokens / step.step_time_s if step.step_time_s > 0 else 0.0


def model_flops(plan: StepPlan, model: ModelShape) -> float:
    """Forward and backward FLOPs of the batch, from the length of every sequence."""
    lengths = plan.lengths.astype(np.float64)
    layer = model.linear_flops_per_token * lengths.sum() + model.attention_flops_per_square * (lengths**2).sum()
    return float(3.0 * (model.num_layers * layer + model.head_flops_per_token * lengths.sum()))


def mfu(step: SimulatedStep, model: ModelShape, *, peak_flops_per_s: float, tp_size: int = 1) -> float:
    """Model FLOPs utilisation of all GPUs of the step."""
    num_gpus = step.plan.hdp_size * step.plan.pp_size * tp_size
    if step.step_time_s <= 0:
        return 0.0
    return model_flops(step.plan, model) / (step.step_time_s * num_gpus * peak_flops_per_s)
