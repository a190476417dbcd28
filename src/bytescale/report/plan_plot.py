"""A plan as a picture: ranks by time, colour by cp_degree. matplotlib, loaded when a picture is asked for.

Up to `MAX_ROWS` ranks each is a row with its micro-batches where they run (with a pipeline: forward and backward on the
first stage). Above that, ranks are sorted by their time, joined to `MAX_ROWS` rows, and each row is the mean time by
degree, so that the shape of the imbalance stays visible.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.arrays import IntArray, ceil_div
from bytescale.cost.makespan import makespan
from bytescale.cost.model import CostModel
from bytescale.cost.predict import durations
from bytescale.errors import UserError, counted
from bytescale.plan.step_plan import StepPlan

MAX_ROWS = 64
_COLOURS = ("#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#f58518", "#e45756", "#b279a2", "#5b3a6e")
_LABELS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "above 64")


def draw_plan(plan: StepPlan, cost: CostModel, path: Path) -> None:
    """Write the picture to `path`; its suffix chooses the format.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib (pip install 'bytescale[report]')") from None
    figure = Figure(figsize=(11, 2.0 + 0.14 * min(plan.hdp_size, MAX_ROWS)), layout="constrained")
    axes = figure.add_subplot()
    if plan.hdp_size <= MAX_ROWS:
        _draw_ranks(axes, plan, cost)
    else:
        _draw_summary(axes, plan, cost)
    assert plan.predicted is not None
    axes.axvline(plan.predicted.lower_bound_s, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, max(plan.predicted.step_time_s, plan.predicted.lower_bound_s) * 1.01)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (dotted: lower bound)")
    axes.set_title(
        f"{plan.strategy}: {counted(plan.num_sequences, 'sequence')}, {counted(plan.num_tokens, 'token')}, "
        f"step {plan.predicted.step_time_s:.3g} s, {plan.predicted.step_time_s / plan.predicted.lower_bound_s:.3f} "
        "of the bound",
        loc="left",
        fontsize=10,
    )
    _legend(axes, plan)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw to {path}: {error}") from None


def degree_class(degree: IntArray) -> IntArray:
    """Index of the colour of a degree: 1, 2, 3-4, 5-8, ..., above 64."""
    return np.minimum(np.ceil(np.log2(np.maximum(degree, 1))).astype(np.int64), len(_COLOURS) - 1)


def _micro_batch_classes(plan: StepPlan) -> IntArray:
    """Colour of each micro-batch: that of its largest degree."""
    ids = plan.micro_batch_ids()
    classes = np.zeros(int(plan.num_micro_batches().sum()), dtype=np.int64)
    np.maximum.at(classes, ids, degree_class(plan.sequence_degrees()[plan.pieces.sequence]))
    return classes


def _draw_ranks(axes: Any, plan: StepPlan, cost: CostModel) -> None:
    times = durations(plan, cost)
    schedule = makespan(plan, times.forward_s, times.backward_s)
    gang, rank, classes = schedule.gangs.gang, schedule.gangs.rank, _micro_batch_classes(plan)
    if plan.pp_size == 1:
        spans = [(gang, (times.forward_s + times.backward_s)[:, 0])]
    else:
        forward = gang * plan.pp_size * 2
        spans = [(forward, times.forward_s[:, 0]), (forward + 1, times.backward_s[:, 0])]
    for node, width in spans:
        axes.barh(
            rank,
            width,
            left=schedule.start_s[node],
            height=0.86,
            color=[_COLOURS[c] for c in classes],
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_ylim(-0.6, plan.hdp_size - 0.4)
    axes.set_ylabel("rank" if plan.pp_size == 1 else "pipeline, first stage")


def _draw_summary(axes: Any, plan: StepPlan, cost: CostModel) -> None:
    times = durations(plan, cost)
    own = (times.forward_s + times.backward_s).max(axis=1)
    owner = np.repeat(np.arange(plan.hdp_size), plan.num_micro_batches())
    table = np.zeros((plan.hdp_size, len(_COLOURS)))
    np.add.at(table, (owner, _micro_batch_classes(plan)), own)
    order = np.argsort(-table.sum(axis=1), kind="stable")
    rows = np.array([chunk.mean(axis=0) for chunk in np.array_split(table[order], MAX_ROWS)])
    left = np.zeros(MAX_ROWS)
    for c in range(len(_COLOURS)):
        axes.barh(np.arange(MAX_ROWS), rows[:, c], left=left, height=1.0, color=_COLOURS[c])
        left += rows[:, c]
    axes.set_ylim(-0.6, MAX_ROWS - 0.4)
    axes.set_yticks([])
    axes.set_ylabel(f"{plan.hdp_size} ranks, busiest first, {ceil_div(plan.hdp_size, MAX_ROWS)} a row")


def _legend(axes: Any, plan: StepPlan) -> None:
    from matplotlib.patches import Patch

    used = np.unique(degree_class(plan.sequence_degrees()))
    handles = [Patch(color=_COLOURS[c], label=_LABELS[c]) for c in used]
    axes.legend(handles=handles, title="cp_degree", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _power_words(exponent: int) -> str:
    """2^exponent in as few letters as an axis has room for: 512, 64K, 2M."""
    for letter, of in (("G", 30), ("M", 20), ("K", 10)):
        if exponent >= of:
            return f"{2 ** (exponent - of)}{letter}"
    return str(2**exponent)


def draw_lengths(lengths: IntArray, name: str, path: Path) -> None:
    """Share of sequences and of tokens by power of two, as bars.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib (pip install 'bytescale[report]')") from None
    upper = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    edges = np.arange(int(upper.min()), int(upper.max()) + 1)
    sequences = np.bincount(upper, minlength=int(upper.max()) + 1)[edges] / len(lengths)
    tokens = np.bincount(upper, weights=lengths, minlength=int(upper.max()) + 1)[edges] / lengths.sum()
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(np.arange(len(edges)) - 0.2, 100 * sequences, width=0.4, label="sequences", color=_COLOURS[0])
    axes.bar(np.arange(len(edges)) + 0.2, 100 * tokens, width=0.4, label="tokens", color=_COLOURS[4])
    axes.set_xticks(np.arange(len(edges)), [_power_words(e) for e in edges.tolist()], fontsize=8)
    axes.set_xlabel("length up to")
    axes.set_ylabel("per cent")
    axes.set_title(
        f"{name}: {counted(len(lengths), 'sequence')}, {counted(int(lengths.sum()), 'token')}", loc="left", fontsize=10
    )
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw to {path}: {error}") from None
