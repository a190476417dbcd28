"""A reader of trace files as strict as the viewers: what it accepts, Perfetto draws whole."""

import json
from collections import defaultdict
from decimal import Decimal
from typing import Any


def check_trace(text: str) -> list[dict[str, Any]]:
    """The complete events of a trace; fails on what a viewer would drop, move or leave without a name.

    Times are read three ways, as viewers do: exactly, and as doubles of microseconds rounded or cut to nanoseconds.
    On a track two events are apart or one encloses the other.
    """
    events = json.loads(text, parse_float=Decimal, parse_int=Decimal)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert {event["ph"] for event in events} <= {"X", "M"}
    tracks: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in complete:
        assert event["name"] and isinstance(event["name"], str) and isinstance(event["cat"], str)
        assert event["pid"] == int(event["pid"]) and event["tid"] == int(event["tid"])
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert isinstance(event.get("args", {}), dict)
        tracks[event["pid"], event["tid"]].append(event)
    for read in (lambda us: us * 1000, lambda us: round(float(us) * 1000), lambda us: int(float(us) * 1000)):
        for (pid, tid), own in tracks.items():
            assert names["process_name", pid, 0]["name"] and names["thread_name", pid, tid]["name"]
            _check_nesting(sorted((read(e["ts"]), -read(e["dur"]), e["name"]) for e in own))
    return complete


def _check_nesting(spans: list[tuple[Any, Any, str]]) -> None:
    open_until: list[Any] = []
    for begin, minus_duration, name in spans:
        end = begin - minus_duration
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{name} overlaps the event before it"
        open_until.append(end)
