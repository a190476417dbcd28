"""What the reproduction predicts beyond what it was fitted to: a split fits some cells of Fig. 17, predicts others.

    data        fit one data set, predict the other (both ways)
    context     fit 256K and 512K, predict 1M and 2M
    models      fit 7B and 70B, predict the four other models

A fit has three rates (`reproduction.fit`), the same for all models and bounded by what Fig. 18 prints; attention,
floor, layouts and the fixed cost of a step stay as the files have them. Beside them what one cluster cannot explain:
the error with every model at rates of its own, fitted to it. Cost: some minutes with two batches a cell.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np

from bytescale.cost.model import ClusterSpec
from bytescale.cost.presets import cluster_spec
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.figures.throughput import DATA, MODELS
from bytescale.reproduction.fit import Cell, error, fit_cluster, log_errors, plan_cell
from bytescale.reproduction.pool import Progress, each
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import CONTEXTS

NUM_FIT_BATCHES = 2
"""Batches of a cell: stratified, so that two already hold the distribution."""

FITTED_MODELS = ("llama-7b", "llama-70b")

Split = tuple[str, tuple[Cell, ...], tuple[Cell, ...]]
"""Its name, the cells to fit, the cells to predict."""


def holdout(num_batches: int = NUM_FIT_BATCHES, progress: Progress = None, jobs: int = 1) -> list[Row]:
    """Errors of fitted and of held-out speedups, split by split; and what models at rates of their own gain."""
    rows = [row for own in each(partial(_split_rows, num_batches), splits(), jobs, progress) for row in own]
    return rows + each(partial(_own_row, num_batches), MODELS, jobs, progress)


def splits() -> list[Split]:
    """The four splits."""
    contexts = list(CONTEXTS)
    others = [name for name in MODELS if name not in FITTED_MODELS]
    return [
        ("fit github, predict byted", _cells(MODELS, DATA[:1], contexts), _cells(MODELS, DATA[1:], contexts)),
        ("fit byted, predict github", _cells(MODELS, DATA[1:], contexts), _cells(MODELS, DATA[:1], contexts)),
        (
            "fit 256K and 512K, predict 1M and 2M",
            _cells(MODELS, DATA, contexts[:2]),
            _cells(MODELS, DATA, contexts[2:]),
        ),
        ("fit 7B and 70B, predict the others", _cells(FITTED_MODELS, DATA, contexts), _cells(others, DATA, contexts)),
    ]


def _cells(models: Sequence[str], data: Sequence[str], contexts: Sequence[str]) -> tuple[Cell, ...]:
    return tuple(Cell(*each) for each in product(models, data, contexts))


def _split_rows(num_batches: int, split: Split) -> list[Row]:
    """The held-out error of a split, whole and model by model, with the fitted one beside it."""
    title, seen, unseen = split
    cluster = fit_cluster(seen, cluster_spec("paper"), num_batches)
    fitted = _logs(seen, cluster, num_batches)
    held = _logs(unseen, cluster, num_batches)
    names = [cell.model for cell in unseen]
    rows = []
    for model in [*dict.fromkeys(names), "all"]:
        logs = held if model == "all" else held[[name == model for name in names]]
        extra = {"split": title, "fitted_error": error(fitted), "bias": float(np.exp(logs.mean())), **_rates(cluster)}
        rows.append(Row("holdout", "mean error of held-out speedups", error(logs), model=model, extra=extra))
    return rows


def _own_row(num_batches: int, model: str) -> Row:
    """The error of one model on the cluster of all, and at rates of its own."""
    cells = _cells([model], DATA, list(CONTEXTS))
    shared = cluster_spec("paper")
    cluster = fit_cluster(cells, shared, num_batches, within_print=False)
    extra = {"split": "one cluster, and rates of its own", "fitted_error": error(_logs(cells, cluster, num_batches))}
    whole = error(_logs(cells, shared, num_batches))
    return Row("holdout", "mean error on the one cluster", whole, model=model, extra=extra | _rates(cluster))


def _rates(cluster: ClusterSpec) -> dict[str, float]:
    kv_bytes = paper_cluster("llama-7b").cost.kv_bytes_per_token
    return {
        "linear_tflops": cluster.linear_flops_per_s / 1e12,
        "inter_node_gb_per_s": cluster.inter_node.bytes_per_s / 1e9,
        "latency_ms": cluster.inter_node.latency_s * 1e3,
        "ring_step_ms_of_7b": 1e3 * float(cluster.inter_node.time_s(8192 * kv_bytes)),
    }


def _logs(cells: Sequence[Cell], cluster: ClusterSpec, num_batches: int) -> np.ndarray:
    return log_errors([plan_cell(cell, cluster, num_batches) for cell in cells], cluster)
