"""Spans of time and their file: Chrome trace JSON, which chrome://tracing and Perfetto open.

One process per HDP rank and one track (thread) per resource of a rank, with a pipeline of each of its stages, because
viewers do not draw events that overlap on a track: two spans of one (rank, track) must not overlap unless one encloses
the other. Runtime, simulator and report share this form.

Times are whole nanoseconds here, so that a span begins exactly where the one before it ended. The file counts in
microseconds, in steps of an eighth (`GRID_NS`): such numbers are exact with three decimals and in binary as well, so
that no reader can round two neighbours into an overlap. Both ends of a span are put on the grid, never its duration.

Cost: one short JSON object a span; `write_trace` keeps the longest spans when there are more than `max_spans`, so the
file stays bounded, and says in the file how many it left out.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytescale.errors import UserError
from bytescale.files import StrPath, write_text_atomically

GRID_NS = 125
"""The file's resolution: an eighth of a microsecond."""


@dataclass(frozen=True)
class Span:
    """One thing that happened, from `start_ns` for `duration_ns`.

    Attributes:
        name: what it was, e.g. "forward micro-batch 2".
        category: kind that decides its colour, e.g. "forward", "backward", "wait", "reduce".
        start_ns: nanoseconds since the trace began, the same origin on every rank.
        duration_ns: nanoseconds, not negative.
        rank: who.
        track: resource of the rank, e.g. "compute", "send", "offload".
        args: facts that viewers show of a chosen span, e.g. {"tokens": 4096}; plain values or short lists.
    """

    name: str
    category: str
    start_ns: int
    duration_ns: int
    rank: int
    track: str = "compute"
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def start_s(self) -> float:
        return self.start_ns / 1e9

    @property
    def duration_s(self) -> float:
        return self.duration_ns / 1e9

    @property
    def end_s(self) -> float:
        return self.end_ns / 1e9


def span_between(
    name: str,
    category: str,
    begin_s: float,
    end_s: float,
    rank: int,
    track: str = "compute",
    args: Mapping[str, Any] | None = None,
) -> Span:
    """A span from `begin_s` to `end_s`. Spans that share a point in seconds share it in nanoseconds."""
    begin_ns = round(begin_s * 1e9)
    return Span(name, category, begin_ns, round(end_s * 1e9) - begin_ns, rank, track, args or {})


def trace_to_dict(spans: Iterable[Span], *, max_spans: int = 200_000) -> dict[str, Any]:
    """The trace as JSON-ready values: process and thread names, then complete events in order of time."""
    spans = list(spans)
    kept = sorted(spans, key=lambda span: -span.duration_ns)[:max_spans] if len(spans) > max_spans else spans
    tracks = sorted({(span.rank, span.track) for span in kept})
    thread = {key: number for number, key in enumerate(tracks)}
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
    events += [_metadata("thread_name", rank, number, {"name": track}) for (rank, track), number in thread.items()]
    events += [
        _complete(span, thread[span.rank, span.track])
        for span in sorted(kept, key=lambda span: (span.start_ns, -span.duration_ns))
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"spans_left_out": len(spans) - len(kept)}}


def write_trace(spans: Iterable[Span], path: StrPath, *, max_spans: int = 200_000) -> None:
    """Store the trace at `path`, atomically."""
    write_text_atomically(path, json.dumps(trace_to_dict(spans, max_spans=max_spans)) + "\n")


def read_trace(path: StrPath) -> list[Span]:
    """The spans of a trace file as `write_trace` stores them.

    Raises:
        UserError: the file cannot be read or is not such a trace.
    """
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        tracks = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
        return [_span(event, tracks) for event in events if event["ph"] == "X"]
    except OSError as error:
        raise UserError(f"cannot read trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a trace of this program: {type(error).__name__}: {error}") from None


def last_step(spans: Sequence[Span]) -> list[Span]:
    """The spans of the last step: of each rank those since its last span of category "step", which is left out.

    With such spans on several tracks of a rank, one a pipeline stage, the earliest of their last ones counts: no stage
    begins a step before all have ended the one before. A rank without such a span is cut where the first of the others
    begins; without any, all spans are returned.
    """
    last: dict[tuple[int, str], int] = {}
    for span in spans:
        if span.category == "step":
            key = span.rank, span.track
            last[key] = max(span.start_ns, last.get(key, span.start_ns))
    begin: dict[int, int] = {}
    for (rank, _), start_ns in last.items():
        begin[rank] = min(start_ns, begin.get(rank, start_ns))
    first = min(begin.values(), default=min((span.start_ns for span in spans), default=0))
    return [span for span in spans if span.category != "step" and span.start_ns >= begin.get(span.rank, first)]


def _complete(span: Span, thread: int) -> dict[str, Any]:
    """A complete event; its times are multiples of 1/8, which floats and three decimals hold exactly."""
    begin, end = ((at_ns + GRID_NS // 2) // GRID_NS for at_ns in (span.start_ns, span.end_ns))
    event: dict[str, Any] = {
        "name": span.name,
        "cat": span.category,
        "ph": "X",
        "ts": begin * GRID_NS / 1000,
        "dur": (end - begin) * GRID_NS / 1000,
        "pid": span.rank,
        "tid": thread,
    }
    if span.args:
        event["args"] = dict(span.args)
    return event


def _metadata(name: str, rank: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _span(event: dict[str, Any], tracks: dict[tuple[int, int], str]) -> Span:
    return Span(
        name=str(event["name"]),
        category=str(event["cat"]),
        start_ns=round(float(event["ts"]) * 1000),
        duration_ns=round(float(event["dur"]) * 1000),
        rank=int(event["pid"]),
        track=tracks[event["pid"], event["tid"]],
        args=dict(event.get("args", {})),
    )
