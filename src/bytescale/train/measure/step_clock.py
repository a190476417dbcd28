"""Measures a step without holding it up: points in time are noted while it runs and read once, when it is over.

The host may run ahead through all micro-batches (`bytescale.runtime.clock`); the single wait for the device is that of
`read`. Spans of the compute track meet exactly: each begins where the one before it ended.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bytescale.runtime.clock import Marker
from bytescale.trace import Span


class StepClock:
    """The compute track of one rank in one step."""

    def __init__(self, marker: Marker, rank: int) -> None:
        self._marker, self._rank = marker, rank
        self._begin = marker.mark()
        self._laps: list[tuple[str, str, Mapping[str, Any], Any]] = []

    def lap(self, name: str, category: str, args: Mapping[str, Any] | None = None) -> None:
        """Close a span that began where the last one ended."""
        self._laps.append((name, category, args or {}, self._marker.mark()))

    def read(self) -> list[Span]:
        """All spans, in order. Waits for the device, once."""
        self._marker.settle()
        begin_ns = self._marker.at_ns(self._begin)
        spans = []
        for name, category, args, mark in self._laps:
            end_ns = max(begin_ns, self._marker.at_ns(mark))
            spans.append(Span(name, category, begin_ns, end_ns - begin_ns, self._rank, args=args))
            begin_ns = end_ns
        return spans


def without_overlap(spans: Iterable[Span]) -> list[Span]:
    """The spans of one track in order of time, each cut off where the one before it is not over yet.

    Waits are added up per operation and on CUDA placed by the host's clock, so their ends are not exact.
    """
    kept: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        begin_ns = max(span.start_ns, kept[-1].end_ns) if kept else span.start_ns
        end_ns = max(begin_ns, span.end_ns)
        kept.append(Span(span.name, span.category, begin_ns, end_ns - begin_ns, span.rank, span.track, span.args))
    return kept
