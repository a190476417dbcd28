"""Simulated steps for people: tables, and the timeline as a picture (matplotlib, loaded when one is drawn).

Colours follow the category of a span, the same in every picture. Cost: one rectangle a span; more than `MAX_SPANS` are
thinned to the longest.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from bytescale.errors import UserError
from bytescale.report import units
from bytescale.simulator import ContextLimit
from bytescale.trace import Span

MAX_SPANS = 20_000
CATEGORY_COLOURS = (
    ("forward", "#4c78a8"),
    ("backward", "#1f3b5c"),
    ("tensor", "#9ecae9"),
    ("communication", "#e45756"),
    ("copy", "#f58518"),
    ("wait", "#dddddd"),
    ("p2p", "#b279a2"),
    ("offload", "#eeca3b"),
    ("gather", "#54a24b"),
    ("reduce", "#2f6b2f"),
    ("update", "#72b7b2"),
    ("input", "#9d755d"),
)
"""Category -> colour, in the order of the legend."""

_SHARES = (
    ("compute", "compute"),
    ("communication", "exposed communication"),
    ("copy", "exposed copies"),
    ("gang_wait", "gang waiting"),
    ("pp_bubble", "PP bubble"),
    ("dp_bubble", "DP bubble"),
    ("overheads", "fixed"),
)

_NARROW = {"exposed communication": "exposed comms", "tokens/s": "tokens /s"}
"""Headers that are shortened, so that any strategy and step time fits into 120 columns."""


def simulation_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line a batch: step, throughput, where the time of the mean rank goes, memory."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    tensor = max((row["shares"]["tensor"] for row in rows), default=0.0)
    if tensor:
        table.caption = f"compute includes the collectives of tensor parallelism, at most {tensor:.1%}"
        table.caption_justify = "left"
    columns = [
        "plan",
        "sequences",
        "tokens",
        "step",
        "tokens/s",
        "MFU",
        *(label for _, label in _SHARES),
        "peak memory",
    ]
    for name in columns:
        justify: Literal["left", "right"] = "left" if name == "plan" else "right"
        table.add_column(_NARROW.get(name, name).replace(" ", "\n"), justify=justify, no_wrap=True)
    for row in rows:
        shares = row["shares"] | {"compute": row["shares"]["compute"] + row["shares"]["tensor"]}
        table.add_row(
            row["strategy"],
            units.count(row["sequences"]),
            units.count(row["tokens"]),
            units.duration(row["simulated_step_time_s"]),
            units.count(row["tokens_per_s"]),
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            *(f"{shares[key]:.1%}" for key, _ in _SHARES),
            units.size(row["peak_memory_bytes"]),
        )
    return table


def context_table(limits: Sequence[ContextLimit], title: str) -> Table:
    """The longest context by each way."""
    table = Table(title=f"longest context of {title}", title_justify="left", box=box.SIMPLE)
    for name in ("way", "set tokens_per_rank", "tokens a rank", "longest context", "step of that one", "what binds"):
        table.add_column(name, justify="left" if name in ("way", "what binds") else "right")
    for limit in limits:
        table.add_row(
            limit.way,
            f"{limit.tokens_per_rank:,}",
            f"{limit.tokens:,}",
            f"{limit.max_length:,}",
            units.duration(limit.step_time_s),
            limit.binds,
        )
    return table


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib (pip install 'bytescale[report]')") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Any, path: Path) -> None:
    """Write a figure; the suffix chooses the format.

    Raises:
        UserError: the file cannot be written, or its suffix is unknown.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        from matplotlib import rc_context

        # Without a date and with fixed names inside, the same figures give the same file.
        with rc_context({"svg.hashsalt": "bytescale"}):
            picture.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def draw_timeline(spans: Sequence[Span], path: Path, title: str = "") -> None:
    """Ranks and their tracks from top to bottom, time from left to right."""
    rows = sorted({(span.rank, span.track) for span in spans})
    if not rows:
        raise UserError("there is nothing to draw: none of the chosen ranks is in the plan")
    place = {row: number for number, row in enumerate(rows)}
    kept = sorted(spans, key=lambda span: -span.duration_s)[:MAX_SPANS]
    picture = figure(12, 1.4 + 0.22 * len(rows))
    axes = picture.add_subplot()
    colours = dict(CATEGORY_COLOURS)
    for category, colour in CATEGORY_COLOURS:
        chosen = [span for span in kept if span.category == category]
        if not chosen:
            continue
        axes.barh(
            [place[span.rank, span.track] for span in chosen],
            [span.duration_s for span in chosen],
            left=[span.start_s for span in chosen],
            height=0.85,
            color=colour,
            edgecolor="white" if len(kept) < 2000 else None,
            linewidth=0.3,
            label=category,
        )
    assert all(span.category in colours for span in kept)
    axes.set_yticks(range(len(rows)), [f"rank {rank} {track}" for rank, track in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(span.end_s for span in spans))
    axes.set_xlabel("seconds")
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    picture.legend(loc="outside lower center", ncols=11, fontsize=7, frameon=False)
    save(picture, path)
