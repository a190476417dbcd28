"""What a simulated step means: throughput, utilisation, and which loss is the largest.

Shares are means over ranks and stages as parts of the step time, so they add to 1:

    compute + tensor + communication + copy + gang wait + PP bubble + DP bubble + overheads = 1.

MFU counts the FLOPs of the model alone, 3 * (linear * s + attention * s^2) per sequence from its real length, causal
half, no recomputation, over peak FLOPs of all GPUs. Cost: O(sequences).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from bytescale.cost.model import CostModel, ModelShape
from bytescale.plan.step_plan import StepPlan
from bytescale.simulator.engine import SimulatedStep
from bytescale.simulator.memory import peak_memory

PEAK_FLOPS_PER_S: Mapping[str, float] = MappingProxyType(
    {"h100": 989e12, "h800": 989e12, "h200": 989e12, "a100": 312e12}
)
"""Dense bf16 peak of one GPU, from the data sheets. The paper withholds its GPU, so `paper` has no MFU."""


@dataclass(frozen=True)
class Shares:
    """Where the time of the mean rank goes, as parts of the step."""

    compute: float
    tensor: float
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
        tensor=float(ranks.tensor_s.mean()) / whole,
        communication=float(ranks.communication_s.mean()) / whole,
        copy=float(ranks.copy_s.mean()) / whole,
        gang_wait=float(ranks.gang_wait_s.mean()) / whole,
        pp_bubble=float(ranks.pp_bubble_s.mean()) / whole,
        dp_bubble=float(ranks.dp_bubble_s.mean()) / whole,
        overheads=(whole - step.makespan_s) / whole,
    )


def mean_shares(parts: Sequence[Shares]) -> Shares:
    """Means over several steps."""
    return Shares(*(float(np.mean([getattr(one, f.name) for one in parts])) for f in fields(Shares)))


def main_loss(parts: Shares, least: float = 0.005) -> str:
    """The largest part beside compute that a plan can change, in words; "none" below `least` of the step."""
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


def step_figures(
    step: SimulatedStep, model: ModelShape, cost: CostModel, *, tp_size: int = 1, cluster: str | None = None
) -> dict[str, Any]:
    """Everything a table shows of a step, JSON-ready."""
    plan, ranks = step.plan, step.ranks
    memory = peak_memory(plan, model, cost, tp_size=tp_size)
    parts = shares(step)
    peak = PEAK_FLOPS_PER_S.get(cluster or "")
    return {
        "strategy": plan.strategy,
        "hdp_size": plan.hdp_size,
        "pp_size": plan.pp_size,
        "tp_size": tp_size,
        "world_size": plan.hdp_size * plan.pp_size * tp_size,
        "sequences": plan.num_sequences,
        "tokens": plan.num_tokens,
        "simulated_step_time_s": step.step_time_s,
        "makespan_s": step.makespan_s,
        "gather_s": step.overheads.gather_s,
        "reduce_s": step.overheads.reduce_s,
        "update_s": step.overheads.update_s,
        "exposed_input_s": step.exposed_input_s,
        "tokens_per_s": tokens_per_s(step),
        "mfu": None if peak is None else mfu(step, model, peak_flops_per_s=peak, tp_size=tp_size),
        "shares": asdict(parts),
        "main_loss": main_loss(parts),
        "busiest_rank_s": float(ranks.busy_s.max(initial=0.0)),
        "transfer_busy_s_max": float(ranks.transfer_s.max(initial=0.0)),
        "d2h_busy_s_max": float(ranks.d2h_s.max(initial=0.0)),
        "h2d_busy_s_max": float(ranks.h2d_s.max(initial=0.0)),
        "peak_memory_bytes": float(memory.total_bytes.max()),
        "state_bytes": memory.state_bytes,
        "activation_bytes_max": float(memory.activation_bytes.max()),
        "host_memory_bytes": float(memory.host_bytes.max()),
        "cost": cost.name,
        "cost_source": cost.provenance,
    }
