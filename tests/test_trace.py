"""Trace files: what viewers need, and the way back."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.errors import UserError
from bytescale.trace import Span, last_step, read_trace, span_between, trace_to_dict, write_trace
from tests.traces import check_trace

SPANS = st.lists(
    st.builds(
        Span,
        name=st.text(max_size=8),
        category=st.sampled_from(["forward", "wait", "step"]),
        start_ns=st.integers(0, 10**8).map(lambda eighths: 125 * eighths),
        duration_ns=st.integers(0, 10**7).map(lambda eighths: 125 * eighths),
        rank=st.integers(0, 5),
        track=st.sampled_from(["compute", "send"]),
        args=st.dictionaries(st.sampled_from(["tokens", "sequences"]), st.integers(0, 9) | st.lists(st.integers(0, 9))),
    ),
    max_size=20,
)


@given(SPANS)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, spans: list[Span]) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    write_trace(spans, path)
    got = read_trace(path)
    assert sorted(map(_key, got)) == sorted(map(_key, spans))
    assert [span.start_ns for span in got] == sorted(span.start_ns for span in spans)


def _key(span: Span) -> tuple[object, ...]:
    return span.start_ns, span.duration_ns, span.rank, span.track, span.name, span.category, json.dumps(span.args)


def test_the_form_that_viewers_read() -> None:
    spans = [
        Span("forward 0", "forward", 10**6, 5 * 10**8, 1, args={"tokens": 7}),
        Span("kv", "send", 2 * 10**6, 25 * 10**7, 1, "send"),
    ]
    events = trace_to_dict(spans)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert complete[0] == {
        "name": "forward 0",
        "cat": "forward",
        "ph": "X",
        "ts": 1000.0,
        "dur": 500_000.0,
        "pid": 1,
        "tid": 0,
        "args": {"tokens": 7},
    }
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == "rank 1"
    assert names["thread_name", 1, 0] == "compute" and names["thread_name", 1, 1] == "send"
    assert complete[0]["tid"] != complete[1]["tid"]


def test_the_file_is_bounded_and_says_so() -> None:
    spans = [Span(str(i), "forward", i, i, 0) for i in range(10)]
    trace = trace_to_dict(spans, max_spans=3)
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["7", "8", "9"]
    assert trace["otherData"] == {"spans_left_out": 7}


def span(name: str, category: str, start_s: float, duration_s: float, rank: int, track: str = "compute") -> Span:
    return span_between(name, category, start_s, start_s + duration_s, rank, track)


def test_last_step() -> None:
    old, new = span("a", "forward", 0.5, 0.1, 1), span("b", "forward", 1.5, 0.1, 1)
    steps = [span("step 1", "step", 0.0, 1.0, 0), span("step 2", "step", 1.0, 1.0, 0)]
    assert last_step([old, *steps, new]) == [new]
    early = span("c", "forward", 0.95, 0.1, 2)
    own = [span("step 1", "step", 0.0, 0.9, 2), span("step 2", "step", 0.9, 1.0, 2)]
    assert last_step([old, *steps, *own, early, new]) == [early, new]
    stages = [
        span(f"step {n}", "step", n - late, 1.0, 0, f"stage {late > 0} step") for n in (0, 1) for late in (0, 0.01)
    ]
    first = span("gather", "gather", 0.99, 0.01, 0, "stage 1")
    assert last_step([span("a", "forward", 0.5, 0.1, 0), *stages, first]) == [first]
    assert last_step([old, new]) == [old, new]
    assert last_step([]) == []


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'])
def test_foreign_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is not a trace of this program"):
        read_trace(path)
    with pytest.raises(UserError, match="No such file"):
        read_trace(tmp_path / "none.json")
    assert json.dumps(trace_to_dict([]))


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=30, unique=True))
def test_neighbours_meet_and_never_overlap_however_a_reader_rounds(points: list[int]) -> None:
    points.sort()
    spans = [Span("x", "forward", a, b - a, 0) for a, b in pairwise(points)]
    whole = Span("step", "step", points[0], points[-1] - points[0], 0)
    check_trace(json.dumps(trace_to_dict([whole, *spans])))
    simulated = [span_between("x", "forward", a / 7e6, b / 7e6, 0) for a, b in pairwise(points)]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(simulated))
    check_trace(json.dumps(trace_to_dict(simulated)))
