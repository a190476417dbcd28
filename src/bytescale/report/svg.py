"""Small charts as SVG text: lines, bars, a timeline. Nothing but strings; every text is escaped.

Colours are CSS classes (`s0`, `s1`, ... for series and categories), so the page decides them for light and dark
screens. Cost and size are bounded: a line keeps at most `MAX_POINTS` points (the least and greatest of each stretch, so
spikes stay visible), a timeline at most `MAX_SPANS` spans (the longest).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from bytescale.report import units
from bytescale.trace import Span

MAX_POINTS = 800
MAX_VALUE = 1e200
MAX_SPANS = 4000
MAX_ROWS = 64
NUM_COLOURS = 8
_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 30
_ROW, _ROW_GAP = 16, 3

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line; points with a value that is not finite (or beyond `MAX_VALUE`) are left out."""

    name: str
    points: Sequence[Point]


def line_chart(
    series: Sequence[Series],
    form: Callable[[float], str] = units.significant,
    *,
    zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over the step number.

    Args:
        series: at most `NUM_COLOURS` lines.
        form: how the labels of the vertical axis are written.
        zero: whether the vertical axis begins at 0.
        marks: steps that something happened before, each with what it was.
    """
    lines = [[(x, y) for x, y in one.points if abs(y) < MAX_VALUE] for one in series]
    xs = [x for line in lines for x, _ in line]
    ys = [y for line in lines for _, y in line]
    if not xs:
        return _no_data()
    x_low, x_high = min(xs), max(xs)
    unit = 1024.0 ** (math.log2(max(1.0, *map(abs, ys))) // 10) if form is units.size else 1.0
    ticks = [tick * unit for tick in nice_ticks((min(0.0, *ys) if zero else min(ys)) / unit, max(ys) / unit)]
    y_low, y_high = ticks[0], ticks[-1]

    def place(point: Point) -> Point:
        across = (point[0] - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (point[1] - y_low) / (y_high - y_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_y_axis(ticks, place, form)]
    for tick in _step_ticks(x_low, x_high):
        parts.append(_text(place((tick, y_low))[0], _HEIGHT - 12, units.count(tick), "middle"))
    for x, what in marks:
        if x_low <= x <= x_high:
            across = place((x, y_low))[0]
            parts.append(
                f'<line class="mark" x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
                f"<title>{escape(what)}</title></line>"
            )
    for number, line in enumerate(lines):
        thin = [place(point) for point in thinned(line)]
        if len(thin) == 1:
            parts.append(f'<circle class="s{number} fill" cx="{thin[0][0]:.1f}" cy="{thin[0][1]:.1f}" r="3"/>')
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in thin)
        parts.append(f'<polyline class="s{number} line" points="{path}"/>')
    return _svg(_WIDTH, _HEIGHT, parts) + _legend([one.name for one in series])


def bar_chart(bars: Sequence[tuple[str, float]], form: Callable[[float], str] = units.count) -> str:
    """One bar for each (label, value), with the value above it."""
    if not bars:
        return _no_data()
    top = max([value for _, value in bars] + [0.0]) or 1.0
    slot = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    every = math.ceil(len(bars) / 16)
    parts = []
    for number, (label, value) in enumerate(bars):
        height = max(0.0, value) / top * (_HEIGHT - _TOP - _BOTTOM - 14)
        x, width = _LEFT + number * slot, min(slot * 0.8, 60)
        left = x + (slot - width) / 2
        y = _HEIGHT - _BOTTOM - height
        parts.append(
            f'<rect class="s0 fill" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{escape(label)}: {escape(form(value))}</title></rect>"
        )
        if number % every == 0:
            parts.append(_text(x + slot / 2, y - 4, form(value), "middle"))
            parts.append(_text(x + slot / 2, _HEIGHT - 12, label, "middle"))
    return _svg(_WIDTH, _HEIGHT, parts)


def timeline(spans: Sequence[Span]) -> str:
    """Ranks from top to bottom, time from left to right; one row for each track of a rank."""
    rows = sorted({(span.rank, span.track) for span in spans})
    if not rows:
        return _no_data()
    shown = {row: number for number, row in enumerate(rows[:MAX_ROWS])}
    kept = [span for span in spans if (span.rank, span.track) in shown]
    kept = sorted(kept, key=lambda span: -span.duration_s)[:MAX_SPANS]
    begin = min(span.start_s for span in kept)
    whole = max(max(span.end_s for span in kept) - begin, 1e-9)
    categories = sorted({span.category for span in kept})
    colour = {category: number % NUM_COLOURS for number, category in enumerate(categories)}
    width, left = 2 * _WIDTH, 18 + 7 * max(len(f"rank {rank} {track}") for rank, track in shown)
    height = len(shown) * (_ROW + _ROW_GAP) + _BOTTOM
    scale = (width - left - _RIGHT) / whole
    parts = [
        _text(left - 8, number * (_ROW + _ROW_GAP) + 12, f"rank {rank} {track}", "end")
        for (rank, track), number in shown.items()
    ]
    for span in kept:
        y = shown[span.rank, span.track] * (_ROW + _ROW_GAP)
        label = f"rank {span.rank}: {span.name} ({span.category}), {units.duration(span.duration_s)}"
        parts.append(
            f'<rect class="s{colour[span.category]} fill" x="{left + (span.start_s - begin) * scale:.2f}" y="{y}" '
            f'width="{max(0.3, span.duration_s * scale):.2f}" height="{_ROW}"><title>{escape(label)}</title></rect>'
        )
    for tick in nice_ticks(0.0, whole):
        if tick <= whole:
            parts.append(_text(left + tick * scale, height - 10, units.duration(tick), "middle"))
    legend = _legend(categories, [colour[category] for category in categories], force=True)
    left_out = len(spans) - len(kept)
    note = f"<p class=note>{left_out:,} shorter spans or further ranks are not drawn.</p>" if left_out else ""
    return _svg(width, height, parts) + legend + note


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that enclose [low, high], at least two of them and about `most` at the most."""
    # A range that floating point can hardly divide is as good as a point.
    if high - low <= max(1e-300, 1e-12 * max(abs(low), abs(high))):
        low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` of the points: of each stretch its lowest and its highest."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _step_ticks(low: float, high: float) -> list[float]:
    """Whole numbers between two steps, the first and the last among them."""
    ticks = [tick for tick in nice_ticks(low, high) if low < tick < high and tick == int(tick)]
    room = (high - low) / 12
    return [low, *(tick for tick in ticks if low + room < tick < high - room), *([high] if high > low else [])]


def _y_axis(ticks: Sequence[float], place: Callable[[Point], Point], form: Callable[[float], str]) -> str:
    parts = []
    for tick in ticks:
        y = place((0.0, tick))[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, form(tick), "end"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _legend(names: Sequence[str], colours: Sequence[int] | None = None, *, force: bool = False) -> str:
    if len(names) < 2 and not force:
        return ""
    keys = "".join(
        f'<span><i class="s{colour} key"></i>{escape(name)}</span>'
        for name, colour in zip(names, colours or range(len(names)), strict=True)
    )
    return f"<p class=legend>{keys}</p>"


def _no_data() -> str:
    return "<p class=note>No data.</p>"
