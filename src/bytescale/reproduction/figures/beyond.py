"""Beyond the paper: every strategy of the planner on the same batches, how far each is from the bound, and scaling.

Static and FlexSP are listed twice, with ring attention and with the head exchange of Ulysses; so is fcp, with as many
tokens a rank as the others and with the 32K of its source (`tokens_per_rank` in every row). The bound is that of the
planner (`bytescale.cost.lower_bound_s`), so gap = step / bound, the fixed cost of a step left out of both. What keeps a
strategy from the bound is the largest of its losses; where the bound is one sequence's time, that is said. With a
pipeline `chunked` is listed too, with what its plans keep in memory. `distca` has no plan; its simulation is one of its
own (`bytescale.simulator.disaggregated`).

Cost: planning and simulating every batch with every strategy; a few seconds a data set.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.cost.micro_batch import head_exchange
from bytescale.cost.predict import degree_one_work_s, lower_bound_s
from bytescale.errors import UserError
from bytescale.plan.memory import in_flight_tokens
from bytescale.planner import make_plan
from bytescale.planner.strategies import fcp
from bytescale.reproduction.calibration import PaperCluster, paper_cluster
from bytescale.reproduction.pool import Progress, each
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import K, folded_cost, folded_static, paper_problem, paper_workload
from bytescale.simulator.disaggregated import simulate_disaggregated
from bytescale.simulator.engine import SimulatedStep, simulate
from bytescale.simulator.outcome import main_loss, shares
from bytescale.simulator.overheads import StepOverheads

STRATEGIES = (
    "static",
    "static-ulysses",
    "megatron-hybrid",
    "megatron-dynamic",
    "flexible-cp",
    "fcp",
    fcp.OWN_SETTING,
    "flexsp",
    "flexsp-ulysses",
    "wlb-llm",
    "hdp-naive",
    "hdp-balance",
    "best",
)
ULYSSES = "-ulysses"
"""Ending of a row whose plans are run with head exchange instead of rings."""
DISTCA = "distca"
OTHER_SETTINGS = (*(name for name in STRATEGIES if name.endswith(ULYSSES)), fcp.OWN_SETTING, DISTCA)
"""Rows with other costs or more memory than those `best` is made for, which promises nothing about them."""

CHUNKED = "chunked"
DATA = ("github", "byted", "wikipedia", "wlb")
PIPELINE_MODELS = ("llama-70b", "mistral-8x7b", "mistral-8x22b")
SCALING_RANKS = (64, 256, 1024, 4096, 16384)
CONTEXT = 2048 * K
NUM_BATCHES = 2


def strategy_table(num_batches: int = NUM_BATCHES, progress: Progress = None, jobs: int = 1) -> list[Row]:
    """All strategies on four data sets without a pipeline, and on two with one."""
    cells: list[tuple[str, str]] = [("llama-7b", data) for data in DATA]
    cells += [(model, data) for model in PIPELINE_MODELS for data in DATA[:2]]
    found = each(partial(_cell_rows, num_batches), cells, jobs, progress)
    return _with_speedups([row for rows in found for row in rows])


def _cell_rows(num_batches: int, cell: tuple[str, str]) -> list[Row]:
    model, data = cell
    cluster = replace(paper_cluster(model), update_s=0.0)
    work = paper_workload(data, CONTEXT, cluster.batch_tokens, num_batches)
    context = max(int(batch.max()) for batch in work.batches)
    names = STRATEGIES if cluster.pp_size == 1 else (*STRATEGIES, CHUNKED)
    rows = [_strategy_row(cluster, data, context, work.batches, name) for name in names]
    return [row for row in (*rows, _distca_row(cluster, data, work.batches)) if row is not None]


def run_strategy(cluster: PaperCluster, lengths: IntArray, name: str, context: int) -> tuple[SimulatedStep, str]:
    """One batch under one strategy, without the fixed cost of a step; and who made the plan."""
    arguments: dict[str, Any] = {
        "hdp_size": cluster.hdp_size,
        "tokens_per_rank": cluster.tokens_per_rank,
        "cost": cluster.cost,
        "context": context,
        "pp_size": cluster.pp_size,
    }
    strategy = name.removesuffix(ULYSSES)
    heads = None if strategy == name else head_exchange(cluster.model, cluster.tp_size)
    cost = cluster.cost
    if strategy == "static":
        plan = folded_static(lengths, **arguments)
        cost = folded_cost(cost, plan)
    elif strategy == fcp.OWN_SETTING:
        plan = make_plan(fcp.in_own_setting(paper_problem(cluster, lengths, context)), "fcp")
    else:
        plan = make_plan(paper_problem(cluster, lengths, context), strategy)
    return simulate(plan, cost, StepOverheads(), ulysses=heads), plan.origin or strategy


def _strategy_row(cluster: PaperCluster, data: str, context: int, batches: Sequence[IntArray], name: str) -> Row | None:
    steps: list[SimulatedStep] = []
    origins: dict[str, int] = {}
    for lengths in batches:
        try:
            step, origin = run_strategy(cluster, lengths, name, context)
        except UserError:
            return None
        steps.append(step)
        origins[origin] = origins.get(origin, 0) + 1
    parts = [shares(step) for step in steps]
    time_s = np.array([step.step_time_s for step in steps])
    others = {origin: count for origin, count in origins.items() if origin != name and name == "best"}
    extra: dict[str, Any] = {
        "tokens_per_rank": max(step.plan.tokens_per_rank for step in steps),
        "exposed_communication": float(np.mean([p.communication for p in parts])),
        "gang_wait": float(np.mean([p.gang_wait for p in parts])),
        "pp_bubble": float(np.mean([p.pp_bubble for p in parts])),
        "dp_bubble": float(np.mean([p.dp_bubble for p in parts])),
        "main_loss": main_loss(parts[int(time_s.argmax())]),
        "taken_from": others,
        **(_kept(steps) if name == CHUNKED else {}),
    }
    return _row(cluster, data, batches, name, time_s, extra)


def _distca_row(cluster: PaperCluster, data: str, batches: Sequence[IntArray]) -> Row:
    """Attention as tasks on any rank; no plan, so its own simulation."""
    steps = [
        simulate_disaggregated(
            lengths,
            cluster.cost,
            head_exchange(cluster.model, cluster.tp_size),
            hdp_size=cluster.hdp_size,
            tokens_per_rank=cluster.tokens_per_rank,
            pp_size=cluster.pp_size,
        )
        for lengths in batches
    ]
    time_s = np.array([step.step_time_s for step in steps])
    exposed = float(np.mean([step.exposed_s / step.step_time_s for step in steps]))
    extra: dict[str, Any] = {
        "tokens_per_rank": cluster.tokens_per_rank,
        "exposed_communication": exposed,
        "main_loss": "exposed communication" if exposed > 0.005 else "none",
        "taken_from": {},
        "imbalance_most": max(step.imbalance for step in steps),
        "received_tokens_most": max(step.received_tokens for step in steps),
    }
    return _row(cluster, data, batches, DISTCA, time_s, extra)


def _row(
    cluster: PaperCluster, data: str, batches: Sequence[IntArray], name: str, time_s: FloatArray, extra: dict[str, Any]
) -> Row:
    """A row with what all have: step times beside the bound."""
    bounds = [lower_bound_s(cluster.cost, b, cluster.hdp_size, cluster.pp_size) for b in batches]
    work = [_work_bound_s(cluster, b) for b in batches]
    gaps = time_s / np.array(bounds)
    common: dict[str, Any] = {
        "step_s": float(time_s.mean()),
        "gap": float(gaps.mean()),
        "gap_most": float(gaps.max()),
        "longest_binds": sum(bound > w * 1.001 for bound, w in zip(bounds, work, strict=True)),
        "step_s_each": time_s.tolist(),
    }
    rate, extra = float((cluster.batch_tokens / time_s).mean()), common | extra
    return Row("beyond", "tokens/s", rate, model=cluster.model.name, data=data, context="2M", system=name, extra=extra)


def _work_bound_s(cluster: PaperCluster, lengths: IntArray) -> float:
    layers = None if cluster.pp_size == 1 else -(-cluster.model.num_layers // cluster.pp_size)
    return float(degree_one_work_s(cluster.cost, lengths, layers).sum()) / cluster.hdp_size


def _kept(steps: Sequence[SimulatedStep]) -> dict[str, Any]:
    """What chunks keep between forward and backward, as shares of what 1F1B of whole sequences may."""
    plans = [step.plan for step in steps]
    return {
        "in_flight_share": max(float(in_flight_tokens(p).max()) / (p.pp_size * p.tokens_per_rank) for p in plans),
        "chunks_most": max(int(p.sequence_chunks().max()) for p in plans),
        "kept_gradient_share": max(p.kept_gradient_share for p in plans),
    }


def _with_speedups(rows: list[Row]) -> list[Row]:
    """Each row with its speed over static's and hdp-balance's of the same cell."""
    rate = {(row.model, row.data, row.system): row.ours for row in rows}
    result = []
    for row in rows:
        static = rate.get((row.model, row.data, "static"))
        balance = rate.get((row.model, row.data, "hdp-balance"))
        extra = dict(row.extra)
        extra["speedup"] = row.ours / static if static else None
        extra["over_hdp_balance"] = row.ours / balance if balance else None
        result.append(replace(row, extra=extra))
    return result


def scaling(progress: Progress = None, jobs: int = 1) -> list[Row]:
    """`best` and `static` from 64 to 16,384 ranks on one Byted and one GitHub batch of 32M tokens (strong scaling)."""
    cells = [(data, ranks) for data in DATA[:2] for ranks in SCALING_RANKS]
    return [row for rows in each(_scaling_rows, cells, jobs, progress) for row in rows]


def _scaling_rows(cell: tuple[str, int]) -> list[Row]:
    data, ranks = cell
    base = replace(paper_cluster("llama-7b"), update_s=0.0)
    lengths = paper_workload(data, CONTEXT, base.batch_tokens, 1).batches[0]
    context = min(CONTEXT, ranks * base.tokens_per_rank)
    cluster = replace(base, hdp_size=ranks)
    cut = np.minimum(lengths, context)
    bound = lower_bound_s(base.cost, cut, ranks)
    rows = []
    for name in ("static", "best"):
        step, _ = run_strategy(cluster, cut, name, int(cut.max()))
        extra = {"ranks": ranks, "step_s": step.step_time_s, "gap": step.step_time_s / bound, "context": context}
        rate = float(cut.sum()) / step.step_time_s
        rows.append(Row("scaling", "tokens/s", rate, model="llama-7b", data=data, system=name, extra=extra))
    return rows
