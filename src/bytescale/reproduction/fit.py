"""Fits the two times of a model that the paper does not print: linear work and a ring step, for C tokens and one layer.

Objective: mean |ln(ours / paper)| over the speedups of Fig. 17 in chosen cells. Speedups fix the ratio of the two times
to each other and to attention, whose rate is common to all models. Search: one factor at a time on a logarithmic grid,
steps halved three times, from the constants of the file.

`fit_cluster` fits the same two rates (FLOP/s and bytes/s of a GPU) to several models at once, which scales them by
FLOPs and bytes: what one cluster predicts of models it was not fitted to.

Invariant: equal cells give equal constants. Cost: about 25 evaluations, each 0.1 to 0.3 s a cell and batch.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.cost.presets import MODELS
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.published import published
from bytescale.reproduction.systems import CONTEXTS, paper_workload, step_times_s

SYSTEMS = {"hdp-naive": "naive", "hdp-balance": "balance"}
"""System -> its key among the published speedups."""

_STEPS = (1.25, 1.12, 1.06)
_MOST_ROUNDS = 6


@dataclass(frozen=True)
class Cell:
    """One model, data set and context of Fig. 17: two speedups over static."""

    model: str
    data: str
    context: str


def log_errors(cells: Sequence[Cell], calibration: dict[str, Any], num_batches: int) -> np.ndarray[Any, Any]:
    """ln(ours / paper) of both speedups of every cell. Shape [cells, 2]."""
    return np.array([_log_errors(cell, calibration, num_batches) for cell in cells])


def _log_errors(cell: Cell, calibration: dict[str, Any], num_batches: int) -> list[float]:
    cluster = paper_cluster(cell.model, calibration)
    work = paper_workload(cell.data, CONTEXTS[cell.context], cluster.batch_tokens, num_batches)
    table = published()["fig17"][cell.model][cell.data]
    number = list(CONTEXTS).index(cell.context)
    rate = {system: float((1.0 / step_times_s(cluster, work, system)).mean()) for system in ("static", *SYSTEMS)}
    return [float(np.log(rate[name] / rate["static"] / table[key][number])) for name, key in SYSTEMS.items()]


def error(logs: np.ndarray[Any, Any]) -> float:
    """Geometric-mean absolute error of ln ratios."""
    return float(np.expm1(np.abs(logs).mean()))


def fit_model(cells: Sequence[Cell], calibration: dict[str, Any], num_batches: int) -> dict[str, Any]:
    """The calibration with `linear_ms` and `transfer_ms` of the one model of `cells` fitted to them."""
    name = cells[0].model
    own = calibration["models"][name]

    def at(factors: tuple[float, float]) -> dict[str, Any]:
        changed = copy.deepcopy(calibration)
        changed["models"][name]["linear_ms"] = own["linear_ms"] * factors[0]
        changed["models"][name]["transfer_ms"] = own["transfer_ms"] * factors[1]
        return changed

    return at(_descend(lambda factors: error(log_errors(cells, at(factors), num_batches))))


def fit_cluster(cells: Sequence[Cell], calibration: dict[str, Any], num_batches: int) -> dict[str, Any]:
    """The calibration of one cluster: linear FLOP/s and ring bytes/s of a GPU, fitted to `cells`, for every model."""
    names = list(dict.fromkeys(cell.model for cell in cells))
    start = [float(np.exp(np.mean([np.log(rate(calibration, name)[i]) for name in names]))) for i in (0, 1)]

    def at(factors: tuple[float, float]) -> dict[str, Any]:
        return with_rates(calibration, start[0] / factors[0], start[1] / factors[1])

    return at(_descend(lambda factors: error(log_errors(cells, at(factors), num_batches))))


def rate(calibration: dict[str, Any], name: str) -> tuple[float, float]:
    """Linear FLOP/s and ring bytes/s of one GPU that the constants of a model imply."""
    own, tokens = calibration["models"][name], float(calibration["common"]["tokens_per_rank"]["value"])
    model = MODELS[name]
    flops = model.linear_flops_per_token * tokens / own["tp_size"]
    return flops / (own["linear_ms"] * 1e-3), model.kv_bytes_per_token * tokens / own["tp_size"] / (
        own["transfer_ms"] * 1e-3
    )


def with_rates(calibration: dict[str, Any], flops_per_s: float, bytes_per_s: float) -> dict[str, Any]:
    """The calibration in which every model runs at the same rates."""
    changed = copy.deepcopy(calibration)
    for name, own in changed["models"].items():
        now = rate(calibration, name)
        own["linear_ms"] *= now[0] / flops_per_s
        own["transfer_ms"] *= now[1] / bytes_per_s
    return changed


def _descend(objective: Callable[[tuple[float, float]], float]) -> tuple[float, float]:
    """The pair of factors with the least objective, changed one at a time while that helps."""
    at, best = (1.0, 1.0), objective((1.0, 1.0))
    for step in _STEPS:
        for _ in range(_MOST_ROUNDS):
            moves = [(at[0] * f, at[1]) for f in (step, 1 / step)] + [(at[0], at[1] * f) for f in (step, 1 / step)]
            values = [objective(move) for move in moves]
            if min(values) >= best - 1e-6:
                break
            best = min(values)
            at = moves[values.index(best)]
    return at
