"""Spans of time and their file: Chrome trace JSON, which chrome://tracing and Perfetto open.

One process per HDP rank and one track (thread) per resource of a rank, with a pipeline of each of its stages, because
viewers do not draw events that overlap on a track: two spans of one (rank, track) must not overlap unless one encloses
the other. Times are seconds here and microseconds in the file. Runtime, simulator and report share this form.

Cost: one short JSON object a span; `write_trace` keeps the longest spans when there are more than `max_spans`, so the
file stays bounded, and says in the file how many it left out.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale.errors import UserError
from bytescale.files import StrPath, write_text_atomically


@dataclass(frozen=True)
class Span:
    """One thing that happened, from `start_s` for `duration_s`.

    Attributes:
        name: what it was, e.g. "forward micro-batch 2".
        category: kind that decides its colour, e.g. "forward", "backward", "wait", "reduce".
        start_s: seconds since the trace began, the same origin on every rank.
        duration_s: seconds, not negative.
        rank: who.
        track: resource of the rank, e.g. "compute", "send", "offload".
    """

    name: str
    category: str
    start_s: float
    duration_s: float
    rank: int
    track: str = "compute"

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def trace_to_dict(spans: Iterable[Span], *, max_spans: int = 200_000) -> dict[str, Any]:
    """The trace as JSON-ready values: process and thread names, then complete events in order of time."""
    spans = list(spans)
    kept = sorted(spans, key=lambda span: -span.duration_s)[:max_spans] if len(spans) > max_spans else spans
    tracks = sorted({(span.rank, span.track) for span in kept})
    thread = {key: number for number, key in enumerate(tracks)}
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
    events += [_metadata("thread_name", rank, number, {"name": track}) for (rank, track), number in thread.items()]
    for span in sorted(kept, key=lambda span: (span.start_s, -span.duration_s)):
        events.append(
            {
                "name": span.name,
                "cat": span.category,
                "ph": "X",
                "ts": round(span.start_s * 1e6, 3),
                "dur": round(span.duration_s * 1e6, 3),
                "pid": span.rank,
                "tid": thread[span.rank, span.track],
            }
        )
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
    last: dict[tuple[int, str], float] = {}
    for span in spans:
        if span.category == "step":
            key = span.rank, span.track
            last[key] = max(span.start_s, last.get(key, span.start_s))
    begin: dict[int, float] = {}
    for (rank, _), start_s in last.items():
        begin[rank] = min(start_s, begin.get(rank, start_s))
    first = min(begin.values(), default=float("-inf"))
    return [span for span in spans if span.category != "step" and span.start_s >= begin.get(span.rank, first)]


def _metadata(name: str, rank: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _span(event: dict[str, Any], tracks: dict[tuple[int, int], str]) -> Span:
    return Span(
        name=str(event["name"]),
        category=str(event["cat"]),
        start_s=float(event["ts"]) / 1e6,
        duration_s=float(event["dur"]) / 1e6,
        rank=int(event["pid"]),
        track=tracks[event["pid"], event["tid"]],
    )
