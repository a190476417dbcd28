"""Pictures of a reproduction: ours beside the paper's. matplotlib, loaded when a picture is drawn.

One function a figure, all of them rows in, file out. Colours: the paper grey, ours blue and orange.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bytescale.report.simulation import figure, save
from bytescale.reproduction.rows import Row

_PAPER, _NAIVE, _BALANCE = "#b0b0b0", "#f2a65a", "#3b6fb6"
_STRATEGY_COLOURS = (
    *("#9a9a9a", "#c9c9c9", "#b279a2", "#e377c2", "#72b7b2", "#eeca3b", "#f7e39c", "#bcbd22", "#dbdb8d", "#8c564b"),
    *("#f2a65a", "#3b6fb6", "#1d7a3c", "#17becf", "#d62728"),
)


def draw_figure(name: str, rows: Sequence[Row], path: Path) -> None:
    """Draw figure `name`; the suffix of `path` chooses the format."""
    picture = _DRAWINGS.get(name, _pairs)(rows)
    save(picture, path)


def has_picture(name: str, rows: Sequence[Row]) -> bool:
    """Whether there is something to draw: a figure of its own kind, or a number beside the paper's."""
    return name in _DRAWINGS or any(row.paper is not None for row in rows)


def _speedups(rows: Sequence[Row]) -> Any:
    """Fig. 17: a panel a model, contexts of both data sets, naive and balance, the paper's as outlines."""
    models = list(dict.fromkeys(row.model for row in rows))
    picture = figure(13, 6.2)
    axes = picture.subplots(2, 3)
    for panel, model in zip(axes.ravel(), models, strict=True):
        own = [row for row in rows if row.model == model]
        cells = list(dict.fromkeys((row.data, row.context) for row in own))
        for offset, system, colour in ((-0.2, "hdp-naive", _NAIVE), (0.2, "hdp-balance", _BALANCE)):
            chosen = {(row.data, row.context): row for row in own if row.system == system}
            places = [number + offset for number in range(len(cells))]
            panel.bar(places, [chosen[c].ours for c in cells], 0.36, color=colour, label=f"{system}, ours")
            panel.plot(places, [chosen[c].paper for c in cells], "_", color="black", markersize=13, markeredgewidth=1.8)
        panel.plot([], [], "_", color="black", markersize=13, markeredgewidth=1.8, label="paper")
        panel.set_xticks(range(len(cells)), [f"{context}\n{data}" for data, context in cells], fontsize=7)
        panel.set_title(model, fontsize=10, loc="left")
        panel.axhline(1.0, color="#888888", linewidth=0.8)
        panel.set_ylabel("speedup over static", fontsize=8)
    axes[0, 0].legend(fontsize=8, frameon=False)
    return picture


def _pairs(rows: Sequence[Row]) -> Any:
    """Horizontal bars of ours with the paper's as a mark, for figures of single numbers."""
    shown = [row for row in rows if row.paper is not None]
    picture = figure(9, 0.9 + 0.32 * len(shown))
    axes = picture.add_subplot()
    labels = [", ".join(filter(None, (row.data, row.context, row.system, row.quantity))) for row in shown]
    ratios = [row.ours / row.paper if row.paper else 1.0 for row in shown]
    axes.barh(range(len(shown)), ratios, 0.6, color=_BALANCE)
    for number, row in enumerate(shown):
        beside = max(ratios[number], 1.0)
        axes.text(beside, number, f" {row.ours:.3g} (paper {row.paper:.3g})", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*ratios, 1.0]) * 1.3)
    axes.set_xlabel("ours / paper")
    return picture


def _ablation(rows: Sequence[Row]) -> Any:
    """Fig. 20: one bar a step."""
    shown = [row for row in rows if row.paper is not None]
    picture = figure(8, 3.6)
    axes = picture.add_subplot()
    places = range(len(shown))
    axes.bar([p - 0.2 for p in places], [row.ours for row in shown], 0.38, color=_BALANCE, label="ours")
    axes.bar([p + 0.2 for p in places], [row.paper for row in shown], 0.38, color=_PAPER, label="paper")
    for p, row in zip(places, shown, strict=True):
        axes.text(p - 0.2, row.ours, f"{row.ours:.2f}", ha="center", va="bottom", fontsize=8)
        axes.text(p + 0.2, row.paper, f"{row.paper:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(list(places), [str(row.system) for row in shown])
    axes.set_ylabel("speedup over static")
    axes.legend(frameon=False)
    return picture


def _strategies(rows: Sequence[Row]) -> Any:
    """Gap to the lower bound of every strategy, a group a cell; logarithmic, since static lies far off."""
    cells = list(dict.fromkeys((row.model, row.data) for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    picture = figure(13, 4.4)
    axes = picture.add_subplot()
    width = 0.85 / len(systems)
    for number, (system, colour) in enumerate(zip(systems, _STRATEGY_COLOURS, strict=False)):
        chosen = {(row.model, row.data): row.extra["gap"] for row in rows if row.system == system}
        places = [i + (number - len(systems) / 2 + 0.5) * width for i, c in enumerate(cells) if c in chosen]
        axes.bar(places, [chosen[c] for c in cells if c in chosen], width, color=colour, label=system)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log")
    ticks = [1, 1.5, 2, 3, 5, 10, 20]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(0.9, None)
    axes.set_xticks(range(len(cells)), [f"{model}\n{data}" for model, data in cells], fontsize=8)
    axes.set_ylabel("step / lower bound")
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="upper right")
    return picture


def _scaling(rows: Sequence[Row]) -> Any:
    """Tokens/s over ranks, both axes logarithmic."""
    picture = figure(7.5, 4.2)
    axes = picture.add_subplot()
    for data, style in (("github", "-"), ("byted", "--")):
        for system, colour in (("static", _NAIVE), ("best", _BALANCE)):
            own = [row for row in rows if row.data == data and row.system == system]
            ranks, rate = [row.extra["ranks"] for row in own], [row.ours for row in own]
            axes.plot(ranks, rate, style, color=colour, marker="o", markersize=4, label=f"{system}, {data}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.extra["ranks"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("HDP ranks")
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return picture


def _holdouts(rows: Sequence[Row]) -> Any:
    """Fitted and held-out error of every split, all models together."""
    whole = [row for row in rows if row.model == "all"]
    picture = figure(9, 1.2 + 0.6 * len(whole))
    axes = picture.add_subplot()
    for offset, label, values, colour in (
        (-0.2, "fitted", [row.extra["fitted_error"] for row in whole], _NAIVE),
        (0.2, "held out", [row.ours for row in whole], _BALANCE),
    ):
        axes.barh([i + offset for i in range(len(whole))], [100 * v for v in values], 0.36, color=colour, label=label)
    axes.set_yticks(range(len(whole)), [row.extra["split"] for row in whole], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("geometric-mean error of the speedups of Fig. 17, per cent")
    axes.legend(fontsize=8, frameon=False)
    return picture


_DRAWINGS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "fig17": _speedups,
    "holdout": _holdouts,
    "fig20": _ablation,
    "beyond": _strategies,
    "scaling": _scaling,
}
