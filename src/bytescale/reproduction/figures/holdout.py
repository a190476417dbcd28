"""What the reproduction predicts beyond what it was fitted to: a split fits some cells of Fig. 17, predicts others.

    data        fit one data set, predict the other (both ways)
    context     fit 256K and 512K, predict 1M and 2M
    models      one cluster (FLOP/s and ring bytes/s of a GPU) fitted to 7B and 70B predicts the four other models

The first two fit the two times of each model (`reproduction.fit`); attention, floors and the step's fixed cost stay as
the file has them. Cost: about ten minutes with two batches a cell.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from bytescale.reproduction.calibration import read_calibration
from bytescale.reproduction.figures.throughput import DATA, MODELS
from bytescale.reproduction.fit import Cell, error, fit_cluster, fit_model, log_errors
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import CONTEXTS

NUM_FIT_BATCHES = 2
"""Batches of a cell: stratified, so that two already hold the distribution."""

FITTED_MODELS = ("llama-7b", "llama-70b")

Progress = Callable[[str], None] | None


def holdout(num_batches: int = NUM_FIT_BATCHES, progress: Progress = None) -> list[Row]:
    """Errors of fitted and of held-out speedups, split by split; and what one cluster makes of all models."""
    calibration = read_calibration()
    early, late = list(CONTEXTS)[:2], list(CONTEXTS)[2:]
    splits = [
        ("fit github, predict byted", DATA[:1], list(CONTEXTS), DATA[1:], list(CONTEXTS)),
        ("fit byted, predict github", DATA[1:], list(CONTEXTS), DATA[:1], list(CONTEXTS)),
        ("fit 256K and 512K, predict 1M and 2M", DATA, early, DATA, late),
    ]
    rows: list[Row] = []
    for title, fit_data, fit_contexts, data, contexts in splits:
        fitted, held = [], []
        for model in MODELS:
            if progress is not None:
                progress(f"holdout: {title}: {model}")
            seen, unseen = _cells([model], fit_data, fit_contexts), _cells([model], data, contexts)
            constants = fit_model(seen, calibration, num_batches)
            fitted.append(log_errors(seen, constants, num_batches))
            held.append(log_errors(unseen, constants, num_batches))
            rows += _rows(title, model, fitted[-1], held[-1])
        rows += _rows(title, "all", np.concatenate(fitted), np.concatenate(held))
    return rows + _by_one_cluster(num_batches, progress)


def _by_one_cluster(num_batches: int, progress: Progress) -> list[Row]:
    title = "fit one cluster to 7B and 70B, predict the others"
    if progress is not None:
        progress(f"holdout: {title}")
    seen = _cells(FITTED_MODELS, DATA, list(CONTEXTS))
    constants = fit_cluster(seen, read_calibration(), num_batches)
    fitted = log_errors(seen, constants, num_batches)
    others = [name for name in MODELS if name not in FITTED_MODELS]
    held = [log_errors(_cells([name], DATA, list(CONTEXTS)), constants, num_batches) for name in others]
    rows = [row for name, logs in zip(others, held, strict=True) for row in _rows(title, name, fitted, logs)]
    return rows + _rows(title, "all", fitted, np.concatenate(held))


def _cells(models: Sequence[str], data: Sequence[str], contexts: Sequence[str]) -> list[Cell]:
    return [Cell(*each) for each in product(models, data, contexts)]


def _rows(title: str, model: str, fitted: np.ndarray, held: np.ndarray) -> list[Row]:
    """The held-out error, with the fitted one beside it."""
    extra = {"split": title, "fitted_error": error(fitted), "bias": float(np.exp(held.mean()))}
    return [Row("holdout", "mean error of held-out speedups", error(held), model=model, extra=extra)]
