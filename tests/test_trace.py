"""Trace files: what viewers need, and the way back."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.errors import UserError
from bytescale.trace import Span, last_step, read_trace, trace_to_dict, write_trace

SPANS = st.lists(
    st.builds(
        Span,
        name=st.text(max_size=8),
        category=st.sampled_from(["forward", "wait", "step"]),
        start_s=st.integers(0, 10**7).map(lambda us: us / 1e6),
        duration_s=st.integers(0, 10**6).map(lambda us: us / 1e6),
        rank=st.integers(0, 5),
        track=st.sampled_from(["compute", "send"]),
    ),
    max_size=20,
)


@given(SPANS)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, spans: list[Span]) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    write_trace(spans, path)
    got = read_trace(path)
    assert sorted(map(_key, got)) == sorted(map(_key, spans))
    assert [span.start_s for span in got] == sorted(span.start_s for span in spans)


def _key(span: Span) -> tuple[object, ...]:
    return span.start_s, span.duration_s, span.rank, span.track, span.name, span.category


def test_the_form_that_viewers_read() -> None:
    spans = [Span("forward 0", "forward", 0.001, 0.5, 1), Span("kv", "send", 0.002, 0.25, 1, "send")]
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
    }
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == "rank 1"
    assert names["thread_name", 1, 0] == "compute" and names["thread_name", 1, 1] == "send"
    assert complete[0]["tid"] != complete[1]["tid"]


def test_the_file_is_bounded_and_says_so() -> None:
    spans = [Span(str(i), "forward", float(i), float(i), 0) for i in range(10)]
    trace = trace_to_dict(spans, max_spans=3)
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["7", "8", "9"]
    assert trace["otherData"] == {"spans_left_out": 7}


def test_last_step() -> None:
    old, new = Span("a", "forward", 0.5, 0.1, 1), Span("b", "forward", 1.5, 0.1, 1)
    steps = [Span("step 1", "step", 0.0, 1.0, 0), Span("step 2", "step", 1.0, 1.0, 0)]
    assert last_step([old, *steps, new]) == [new]
    early = Span("c", "forward", 0.95, 0.1, 2)
    own = [Span("step 1", "step", 0.0, 0.9, 2), Span("step 2", "step", 0.9, 1.0, 2)]
    assert last_step([old, *steps, *own, early, new]) == [early, new]
    stages = [
        Span(f"step {n}", "step", n - late, 1.0, 0, f"stage {late > 0} step") for n in (0, 1) for late in (0, 0.01)
    ]
    first = Span("gather", "gather", 0.99, 0.01, 0, "stage 1")
    assert last_step([Span("a", "forward", 0.5, 0.1, 0), *stages, first]) == [first]
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
