"""Fig. 21: what offloading costs at 64K, and that it is free at 256K.

A layer's copies run beside its kernels, so a direction takes max(compute, r * Act / B). With B from one point of the
figure (r = 0.5 is just free at 64K), the other points follow. The figure names neither the model nor its layout: ours
is LLaMA-7B on 8K tokens a rank, and times are compared as slowdowns, memory as savings of activations.
Cost: nothing.
"""

import numpy as np

from bytescale.cost.model import CostModel, with_recompute
from bytescale.plan.memory import resident_tokens
from bytescale.plan.step_plan import step_plan
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import K
from bytescale.simulator.engine import SimulatedStep, simulate


def one_sequence(cost: CostModel, length: int, tokens_per_rank: int, ratio: float) -> SimulatedStep:
    """One sequence at `tokens_per_rank` tokens a rank with one offload ratio."""
    degree = -(-length // tokens_per_rank)
    plan = step_plan(
        strategy="fig21",
        hdp_size=degree,
        tokens_per_rank=tokens_per_rank,
        num_layers=cost.num_layers,
        lengths=[length],
        sequence=np.zeros(degree, np.int64),
        rank=np.arange(degree),
        micro_batch=np.zeros(degree, np.int64),
        tokens=(np.arange(degree) + 1) * length // degree - np.arange(degree) * length // degree,
        offload_ratio=ratio,
        cp_degree=np.full(degree, degree),
        cp_index=np.arange(degree),
    )
    return simulate(plan, cost)


def figure_21() -> list[Row]:
    """Slowdown and kept activations over the offload ratio."""
    paper, cluster = published()["fig21"], paper_cluster("llama-7b")
    cost, capacity = cluster.cost, cluster.tokens_per_rank
    rows = []
    for context in (paper["context_k"], 256):
        normal_s = one_sequence(cost, context * K, capacity, 0.0).step_time_s
        for ratio in (0.5, 0.6, 0.8, 1.0):
            slowdown = one_sequence(cost, context * K, capacity, ratio).step_time_s / normal_s
            kept = float(resident_tokens(np.array([1]), np.array([ratio]), cost.num_layers)[0])
            given = paper["time_s"][str(ratio)] / paper["time_s"]["0.0"] if context == 64 else None
            if context == 256 and ratio == 1.0:
                given = 1.0 + paper["slowdown_256k_full"]
            rows.append(
                Row(
                    "fig21",
                    f"time / time without, offload {ratio:g}",
                    slowdown,
                    given,
                    model="llama-7b",
                    context=f"{context}K",
                    extra={"activations_kept": kept},
                )
            )
        again_s = one_sequence(with_recompute(cost), context * K, capacity, 0.0).step_time_s
        given = paper["time_s"]["recompute"] / paper["time_s"]["0.0"] if context == 64 else None
        rows.append(
            Row("fig21", "time / time without, recompute", again_s / normal_s, given, "llama-7b", context=f"{context}K")
        )
    return rows + _memory_rows(paper["memory_gb"], cost)


def _memory_rows(memory_gb: dict[str, float], cost: CostModel) -> list[Row]:
    """Savings: activations that the figure's two ends imply, and the points between."""
    ends = float(resident_tokens(np.array([1]), np.array([1.0]), cost.num_layers)[0])
    activations_gb = (memory_gb["0.0"] - memory_gb["1.0"]) / (1.0 - ends)
    rows = []
    for ratio in (0.5, 0.6, 0.8):
        kept = float(resident_tokens(np.array([1]), np.array([ratio]), cost.num_layers)[0])
        ours = activations_gb * (1.0 - kept) / memory_gb["0.0"]
        saved = 1.0 - memory_gb[str(ratio)] / memory_gb["0.0"]
        extra = {"note": "from the figure's own ends, 59 GB at 0 and 27 GB at 1"}
        rows.append(
            Row("fig21", f"memory saved, offload {ratio:g}", ours, saved, "llama-7b", context="64K", extra=extra)
        )
    return rows
