"""Fig. 18, 19 and 20: LLaMA-7B on Byted at 2M with 1,024 GPUs, looked at closely.

Communication share of a static micro-batch is the paper's figure by the paper's way: a ring step that is bound by its
transfer counts whole, beside the feed-forward part of the layer,

    share = ring / (ring + feed-forward),      405 / (405 + 10) = 97.6 % there.

Fig. 20 adds one thing after the other: dynamic degrees (hdp-naive), offloading by Eq. 3 under the planner's cap of
1.5 C tokens a rank, balance, and a loader that reads ahead. Before the last step every process reads the whole batch to
learn its lengths, at `loading_bytes_per_token / loading_mb_per_s`, before the step. Cost: a few hundred steps.
"""

from typing import Any

import numpy as np

from bytescale.reproduction.calibration import PaperCluster, constant, paper_cluster
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import (
    CONTEXTS,
    NUM_BATCHES,
    Workload,
    paper_workload,
    run_step,
    static_degree,
    step_times_s,
)
from bytescale.simulator.engine import SimulatedStep
from bytescale.simulator.outcome import shares

MODEL, DATA, CONTEXT = "llama-7b", "byted", "2M"
_SYSTEMS = {"static": "static", "naive": "hdp-naive", "balance": "hdp-balance"}


def _work(cluster: PaperCluster, num_batches: int) -> Workload:
    return paper_workload(DATA, CONTEXTS[CONTEXT], cluster.batch_tokens, num_batches)


def _row(figure: str, quantity: str, ours: float, paper: float | None, system: str | None = None, **extra: Any) -> Row:
    return Row(figure, quantity, ours, paper, MODEL, DATA, CONTEXT, system, extra)


def figure_18(num_batches: int = NUM_BATCHES) -> list[Row]:
    """Communication of one layer, steps of the three systems, spread over ranks."""
    cluster, paper = paper_cluster(MODEL), published()["fig18"]
    work = _work(cluster, num_batches)
    steps = {
        name: [run_step(cluster, b, strategy, context=work.context) for b in work.batches]
        for name, strategy in _SYSTEMS.items()
    }
    time_s = {name: np.array([step.step_time_s for step in steps[name]]) for name in steps}
    rows = _layer_rows(cluster, paper, steps["static"])
    for name, strategy in _SYSTEMS.items():
        low, high = float(time_s[name].min()), float(time_s[name].max())
        rows.append(
            _row(
                "fig18",
                "step s, mean",
                float(time_s[name].mean()),
                paper["step_s"][name],
                strategy,
                least=low,
                most=high,
            )
        )
    for name in ("naive", "balance"):
        ratio = time_s["static"] / time_s[name]
        printed = paper["step_s"]["static"] / paper["step_s"][name]
        inside = bool(ratio.min() <= printed <= ratio.max())
        extra = {"least": float(ratio.min()), "most": float(ratio.max()), "paper_inside_range": inside}
        rows.append(
            _row("fig18", "step ratio static / system, mean", float(ratio.mean()), printed, _SYSTEMS[name], **extra)
        )
    return rows + _spread_rows(paper, steps)


def _layer_rows(cluster: PaperCluster, paper: dict[str, Any], static: list[SimulatedStep]) -> list[Row]:
    """Ring and feed-forward time of one layer and their share, from the median static micro-batch."""
    cost, model = cluster.cost, cluster.model
    degree = static_degree(CONTEXTS[CONTEXT], cluster.tokens_per_rank, cluster.hdp_size)
    edge = float(cluster.tokens_per_rank)
    step_s = max(float(cost.inter_node.time_s(edge * cost.kv_bytes_per_token)), cost.ring_step_floor_s)
    linear_s = cost.forward.token_s * edge
    mlp_share = 1.0 - 2.0 * model.attention_parameters / model.linear_flops_per_token
    mlp_s = linear_s * mlp_share
    ring_s = degree * step_s
    hdp_step_s = max(cost.forward.square_s * edge**2, step_s)
    exposed = float(np.mean([shares(step).communication for step in static]))
    return [
        _row("fig18", "attention ms a layer, 256 ranks, short sequences", 1e3 * ring_s, paper["attention_static_ms"]),
        _row("fig18", "attention ms a layer, 312K on 39 ranks", 1e3 * 39 * hdp_step_s, paper["attention_hdp_ms"]),
        _row("fig18", "feed-forward ms a layer", 1e3 * mlp_s, paper["mlp_ms"]),
        _row(
            "fig18",
            "communication share, ring / (ring + feed-forward)",
            ring_s / (ring_s + mlp_s),
            paper["communication_share"],
            "static",
        ),
        _row("fig18", "exposed communication / step, whole static step", exposed, None, "static"),
    ]


def _spread_rows(paper: dict[str, Any], steps: dict[str, list[SimulatedStep]]) -> list[Row]:
    """Time of the ranks of a step until they are done, waiting for gangs included as a rank's own clock would."""
    naive = paper["naive_rank_s"]
    mean_s = naive["std"] / naive["std_over_mean"]
    printed = {("naive", "std"): naive["std_over_mean"], ("naive", "max"): naive["most"] / mean_s}
    rows = []
    for name, system in (("naive", "hdp-naive"), ("balance", "hdp-balance")):
        done = [step.makespan_s - step.ranks.dp_bubble_s.max(axis=1) for step in steps[name]]
        own = [step.ranks.busy_s.max(axis=1) for step in steps[name]]
        for what, times in (("rank time until done", done), ("rank time without waiting", own)):
            table = np.array([(t.std() / t.mean(), t.max() / t.mean()) for t in times])
            for column, measure in enumerate(("std", "max")):
                values = table[:, column]
                extra = {"least": float(values.min()), "most": float(values.max())}
                given = printed.get((name, measure)) if times is own else None
                rows.append(_row("fig18", f"{what}, {measure} / mean", float(values.mean()), given, system, **extra))
    return rows


def figure_19(num_batches: int = NUM_BATCHES) -> list[Row]:
    """Busy kernels beside those of the balanced plan, and ring traffic beside that of the static one.

    The paper plots tensor-core activity, which is less than busy kernels by a factor nobody published; ratios drop it.
    """
    cluster, paper = paper_cluster(MODEL), published()["fig19"]["compute_share"]
    work = _work(cluster, num_batches)
    busy, traffic_s, rate = {}, {}, {}
    for name, strategy in _SYSTEMS.items():
        steps = [run_step(cluster, b, strategy, context=work.context) for b in work.batches]
        busy[name] = float(np.mean([step.ranks.compute_s.mean() / step.step_time_s for step in steps]))
        traffic_s[name] = float(np.mean([step.ranks.transfer_s.mean() for step in steps]))
        rate[name] = float(np.mean([step.ranks.transfer_s.mean() / step.step_time_s for step in steps]))
    rows = []
    for name, strategy in _SYSTEMS.items():
        ours, printed = busy[name] / busy["balance"], paper[name] / paper["balance"]
        extra = {
            "kernels_busy": busy[name],
            "link_busy": rate[name],
            "traffic_over_static": traffic_s[name] / traffic_s["static"],
        }
        rows.append(_row("fig19", "busy kernels / those of hdp-balance", ours, printed, strategy, **extra))
    halves = published()["fig19"]["traffic_over_static"]
    for name in ("naive", "balance"):
        ours = rate[name] / rate["static"]
        rows.append(_row("fig19", "ring traffic a second / that of static", ours, halves.get(name), _SYSTEMS[name]))
    return rows


def figure_20(num_batches: int = NUM_BATCHES) -> list[Row]:
    """One improvement after the other."""
    cluster, paper = paper_cluster(MODEL), published()["fig20"]["speedup"]
    work = _work(cluster, num_batches)
    loading_s = cluster.batch_tokens * constant("loading_bytes_per_token")
    loading_s /= constant("loading_mb_per_s") * 1e6
    time_s = {
        "static": step_times_s(cluster, work, "static") + loading_s,
        "naive": step_times_s(cluster, work, "hdp-naive") + loading_s,
        "offload": step_times_s(cluster, work, "hdp-naive", "auto") + loading_s,
        "balance": step_times_s(cluster, work, "hdp-balance", "auto") + loading_s,
        "loader": step_times_s(cluster, work, "hdp-balance", "auto"),
        "balance, offload off": step_times_s(cluster, work, "hdp-balance") + loading_s,
    }
    rate = {name: float((cluster.batch_tokens / values).mean()) for name, values in time_s.items()}
    names = list(time_s)
    rows = []
    for before, name in zip([names[0], *names], names, strict=False):
        extra = {"tokens_per_s": rate[name], "factor": rate[name] / rate[before]}
        if name in paper and before in paper:
            extra["paper_factor"] = paper[name] / paper[before]
        rows.append(_row("fig20", "speedup over static", rate[name] / rate["static"], paper.get(name), name, **extra))
    return rows
