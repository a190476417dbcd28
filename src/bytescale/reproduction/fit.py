"""Fits the three rates of the paper's cluster that the paper does not print: linear FLOP/s, ring bandwidth and latency.

Objective: mean |ln(ours / paper)| over the speedups of Fig. 17 in chosen cells. All models of the cells run on the one
cluster; their shapes scale it by FLOPs and bytes. Speedups fix the rates in relation to attention, whose rate stays as
it is. Rates stay where Fig. 18 prints them for llama-7b: a ring step in 1.4 to 1.9 ms, a small micro-batch in 2.3 to
3 s; a fit of models by themselves has no such bounds.

Search: one factor at a time on a logarithmic grid, from the shipped constants, the steps narrowed twice. While a step
lasts plans are held: static and naive plans depend on no rate at all, the order of hdp-balance hardly does.

Invariant: equal cells give equal constants. Cost: about 40 evaluations of 10 to 20 ms a cell and batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bytescale.arrays import IntArray
from bytescale.cost.model import ClusterSpec, Link
from bytescale.cost.predict import predict
from bytescale.plan.step_plan import StepPlan
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.published import published
from bytescale.reproduction.systems import CONTEXTS, folded_cost, paper_workload, plan_step

SYSTEMS = {"hdp-naive": "naive", "hdp-balance": "balance"}
"""System -> its key among the published speedups."""

Factors = tuple[float, float, float]
"""Of linear FLOP/s, of bytes/s and of the latency between nodes."""

_STEPS = (1.2, 1.07)
_MOST_ROUNDS = 4


@dataclass(frozen=True)
class Cell:
    """One model, data set and context of Fig. 17: two speedups over static."""

    model: str
    data: str
    context: str


@dataclass(frozen=True)
class PlannedCell:
    """A cell and the plans of its batches: static, naive, balance."""

    cell: Cell
    plans: tuple[tuple[StepPlan, ...], ...]


def plan_cell(cell: Cell, cluster: ClusterSpec, num_batches: int, before: PlannedCell | None = None) -> PlannedCell:
    """The plans of a cell on a cluster; of the plans `before`, those that no rate changes are kept."""
    paper = paper_cluster(cell.model, cluster)
    work = paper_workload(cell.data, CONTEXTS[cell.context], paper.batch_tokens, num_batches)

    def plan(lengths: IntArray, names: Sequence[str]) -> tuple[StepPlan, ...]:
        return tuple(plan_step(paper, lengths, name, work.context) for name in names)

    kept = [plan(b, ("static", "hdp-naive")) for b in work.batches] if before is None else before.plans
    pairs = zip(work.batches, kept, strict=True)
    return PlannedCell(cell, tuple((*fixed[:2], *plan(lengths, ("hdp-balance",))) for lengths, fixed in pairs))


def log_errors(planned: Sequence[PlannedCell], cluster: ClusterSpec) -> np.ndarray[Any, Any]:
    """ln(ours / paper) of both speedups of every cell. Shape [cells, 2]."""
    return np.array([_log_errors(cell, cluster) for cell in planned])


def _log_errors(planned: PlannedCell, cluster: ClusterSpec) -> list[float]:
    cell, paper = planned.cell, paper_cluster(planned.cell.model, cluster)
    costs = (folded_cost(paper.cost, planned.plans[0][0]), paper.cost, paper.cost)
    step_s = [
        [predict(plan, cost).step_time_s + paper.update_s for plan, cost in zip(plans, costs, strict=True)]
        for plans in planned.plans
    ]
    static, *rates = (1.0 / np.array(step_s)).mean(axis=0)
    table = published()["fig17"][cell.model][cell.data]
    number = list(CONTEXTS).index(cell.context)
    return [float(np.log(r / static / table[key][number])) for r, key in zip(rates, SYSTEMS.values(), strict=True)]


def error(logs: np.ndarray[Any, Any]) -> float:
    """Geometric-mean absolute error of ln ratios."""
    return float(np.expm1(np.abs(logs).mean()))


def fit_cluster(
    cells: Sequence[Cell], cluster: ClusterSpec, num_batches: int, within_print: bool = True
) -> ClusterSpec:
    """`cluster` with its three rates fitted to `cells`, within what Fig. 18 prints unless told otherwise."""
    planned: list[PlannedCell] | list[None] = [None] * len(cells)
    for step in _STEPS:
        planned = [plan_cell(cell, cluster, num_batches, p) for cell, p in zip(cells, planned, strict=True)]
        cluster = _fitted(planned, cluster, step, within_print)
    return cluster


def _fitted(planned: Sequence[PlannedCell], cluster: ClusterSpec, step: float, within_print: bool) -> ClusterSpec:
    def objective(factors: Factors) -> float:
        tried = scaled(cluster, factors)
        return error(log_errors(planned, tried)) if is_as_printed(tried) or not within_print else float("inf")

    return scaled(cluster, descend(objective, step))


def is_as_printed(cluster: ClusterSpec) -> bool:
    """Whether llama-7b has a ring step and a small micro-batch as Fig. 18 prints them."""
    paper, printed = paper_cluster("llama-7b", cluster), published()["fig18"]
    cost, tokens = paper.cost, paper.tokens_per_rank
    ring_step_ms = 1e3 * float(cost.inter_node.time_s(tokens * cost.kv_bytes_per_token))
    small_s = (cost.forward.token_s + cost.backward.token_s) * tokens * cost.num_layers
    measures = ((ring_step_ms, printed["ring_step_ms"]), (small_s, printed["small_micro_batch_s"]))
    return all(low <= value <= high for value, (low, high) in measures)


def scaled(cluster: ClusterSpec, factors: Factors) -> ClusterSpec:
    """The cluster with its rates multiplied."""
    linear, bandwidth, latency = factors
    link = cluster.inter_node
    return replace(
        cluster,
        linear_flops_per_s=cluster.linear_flops_per_s * linear,
        inter_node=Link(link.latency_s * latency, link.bytes_per_s * bandwidth),
    )


def descend(objective: Callable[[Factors], float], step: float) -> Factors:
    """The factors with the least objective, multiplied or divided by `step` one at a time while that helps."""
    at: Factors = (1.0, 1.0, 1.0)
    best = objective(at)
    for _ in range(_MOST_ROUNDS):
        before = best
        for axis in range(3):
            for factor in (step, 1 / step):
                move = tuple(f * factor if i == axis else f for i, f in enumerate(at))
                value = objective((move[0], move[1], move[2]))
                if value < best - 1e-6:
                    at, best = (move[0], move[1], move[2]), value
                    break
        if best == before:
            break
    return at
