"""The report of a run, its charts, the closing table and the progress lines."""

import io
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bytescale.errors import UserError
from bytescale.report import (
    EvaluationLine,
    Progress,
    RunSummary,
    StepLine,
    evaluation_line,
    progress_line,
    read_summary,
    summary_table,
    units,
    write_report,
    write_summary,
)
from bytescale.report.output import say
from bytescale.report.run_report import read_metrics
from bytescale.report.svg import MAX_POINTS, Series, bar_chart, line_chart, nice_ticks, thinned, timeline
from bytescale.trace import span_between, write_trace

STEP = {
    "step": 1,
    "loss": 5.5,
    "grad_norm": 1.25,
    "lr": 1e-3,
    "tokens": 4000,
    "sequences": 12,
    "step_time_s": 2.0,
    "tokens_per_s": 2000.0,
    "num_micro_batches_min": 0,
    "num_micro_batches_max": 3,
    "imbalance": 1.1,
    "cp_degree_max": 4,
    "comm_bytes": 10**6,
    "peak_memory_bytes": 5 * 10**8,
    "plan_time_s": 0.001,
    "data_wait_s": 0.002,
}
SUMMARY = RunSummary(
    steps=2,
    tokens=8000,
    sequences=24,
    loss_first=5.5,
    loss_last=4.25,
    tokens_per_s=2000.0,
    num_micro_batches_min=0,
    num_micro_batches_max=3,
    sequences_by_degree=((1, 18), (4, 6)),
    comm_bytes=2**20,
    comm_bytes_static=5 * 2**20,
    wall_time_s=4.0,
    world_size=4,
    num_split_documents=3,
)


def run_directory(path: Path, steps: int = 2) -> Path:
    lines = [json.dumps(STEP | {"step": n, "loss": 5.5 - n / 4}) for n in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


class _Page(HTMLParser):
    """Collects what a page contains and refuses tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_whole_run(tmp_path: Path) -> None:
    run_directory(tmp_path)
    write_summary(SUMMARY, tmp_path / "summary.json")
    (tmp_path / "config.toml").write_text('[run]\ndir = "<script>alert(1)</script>"\n')
    spans = [span_between("step 2", "step", 1.0, 3.0, 0), span_between("</svg><b>", "forward", 1.5, 2.0, 3)]
    write_trace(spans, tmp_path / "trace.json")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    text = path.read_text()
    page = _Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    assert not [value for _, attributes in page.tags for value in attributes.values() if value and "://" in value]
    assert "url(" not in text and "@import" not in text and "http" not in text
    for words in ("5.5000 / 4.2500", "75.0%", "1 MiB", "5 MiB, 5 times as much", "rank 3 compute", "<script>alert(1)"):
        assert words in page.text
    assert "</svg><b>" in page.text


def test_metrics_alone_are_enough(tmp_path: Path) -> None:
    page = _Page(write_report(run_directory(tmp_path)).read_text())
    assert "Steps by largest cp_degree" in page.text and "5.2500 / 5.0000" in page.text


def test_odd_values_are_left_out(tmp_path: Path) -> None:
    odd: list[Any] = [math.nan, math.inf, None, "x", True, []]
    lines = [json.dumps({key: odd[n % len(odd)] for key in STEP} | {"step": n}) for n in range(12)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"step": 13})]))
    text = write_report(tmp_path).read_text()
    _Page(text)
    assert "nan" not in text and "inf" not in text.replace("info", "")


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run_directory(tmp_path, steps=20_000)
    spans = [span_between(f"span {n}", "forward", n / 10, n / 10 + 0.05, n % 100) for n in range(20_000)]
    write_trace(spans, tmp_path / "trace.json")
    text = write_report(tmp_path).read_text()
    assert len(text) < 1_000_000
    assert "are not drawn" in text


def test_broken_metrics(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read metrics .*No such file.*; is .* a run directory\?"):
        write_report(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match="holds no step yet"):
        write_report(tmp_path)
    good = json.dumps(STEP)
    path.write_text(f"{good}\n{good[:20]}")
    assert len(read_metrics(path)) == 1
    for broken in (good[:20], "3", "{}"):
        path.write_text(f"{good}\n{broken}\n{good}\n")
        with pytest.raises(UserError, match="line 2 is not the metrics of a step"):
            write_report(tmp_path)


def test_summary_round_trip_and_table(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(SUMMARY, path)
    assert read_summary(path) == SUMMARY
    assert SUMMARY.share_degree_1 == 0.75
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(SUMMARY))
    for words in (
        "8,000 in 24 sequences",
        "0 to 3",
        "75.0%",
        "5 MiB, 5 times as much",
        "documents split",
        "2k on 4",
    ):
        assert words in out.getvalue()
    assert "dropped" not in out.getvalue()
    for content in ("{}", "[]", "", '{"sequences_by_degree": 3}'):
        path.write_text(content)
        with pytest.raises(UserError, match="is not the summary of a run"):
            read_summary(path)


def table_text(summary: RunSummary) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(summary))
    return out.getvalue()


def test_the_table_shows_bubbles_of_pipelines_and_what_was_offloaded() -> None:
    assert not any(word in table_text(SUMMARY) for word in ("bubble", "offload"))
    piped = table_text(replace(SUMMARY, pp_size=2, pp_bubble=0.125, dp_bubble=0.03))
    assert re.search(r"PP bubble +12\.5%", piped) and re.search(r"DP bubble +3\.0%", piped)
    moved = replace(SUMMARY, offload_bytes_out=3 * 2**30, offload_bytes_in=2**30, offload_exposed_s=1.5)
    assert "3 GiB out, 1 GiB in, 1.50 s exposed" in table_text(moved)
    assert re.search(r"stayed for want of room +2 MiB", table_text(replace(moved, offload_declined_bytes=2**21)))
    stayed = table_text(replace(SUMMARY, num_unmoved_steps=1))
    assert "0 B out, 0 B in, 0 s exposed" in stayed and re.search(r"steps that offloaded nothing +1 ", stayed)


def test_the_table_says_things_once() -> None:
    even = replace(SUMMARY, num_micro_batches_min=2, num_micro_batches_max=2, comm_bytes_static=2**20, targets=7976)
    text = table_text(even)
    assert re.search(r"micro-batches per rank +2 *\n", text) and "1 MiB, the same" in text
    assert "8,000 in 24 sequences, 7,976 of them targets" in text and re.search(r"steps +2 *\n", text)
    assert re.search(r"steps +2, stopped", table_text(replace(even, status="stopped")))
    assert re.search(r"steps left out, not finite +1", table_text(replace(even, num_nonfinite_steps=1)))


def test_the_report_shows_the_notes_and_what_ran(tmp_path: Path) -> None:
    run_directory(tmp_path)
    told = replace(SUMMARY, notes=("3 documents <empty>",), versions=(("torch", "2.13.0"),), host="node7", seed=4)
    write_summary(told, tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == told
    page = _Page(write_report(tmp_path).read_text())
    assert "3 documents <empty>" in page.text and "node7" in page.text and "2.13.0" in page.text


def test_a_run_without_steps_has_a_table() -> None:
    nothing = RunSummary(0, 0, 0, None, None, 0.0, 0, 0, (), 0, 0, 0.0)
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(nothing))
    assert "none / none" in out.getvalue() and "0.0%" in out.getvalue()


def test_progress_on_a_plain_stream() -> None:
    line = StepLine(3, 20, 4.21, 1.3, 12_345.0, 4, 1, 3, 1.083)
    text = "step  3/20  loss 4.2100  grad_norm 1.30  12.3k tok/s  degrees<=4  micro-batches 1-3  imbalance 1.08"
    assert progress_line(line) == text
    assert "micro-batches 2  " in progress_line(StepLine(3, 20, 4.0, 1.0, 1.0, 1, 2, 2, 1.0))
    out = io.StringIO()
    with Progress(20, stream=out) as progress:
        progress.show(line)
        progress.note("[bold] stays as it is")
    assert out.getvalue() == f"{text}\n[bold] stays as it is\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal() -> None:
    out = _Terminal()
    with Progress(20, stream=out) as progress:
        progress.show(StepLine(3, 20, 4.21, 1.3, 12_345.0, 4, 1, 3, 1.083))
        progress.note("[bold] stays as it is")
    assert "step  3/20  loss 4.2100" in out.getvalue() and "[bold] stays as it is" in out.getvalue()


NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**12), 10**12).map(float)


@given(st.lists(st.tuples(st.integers(0, 10**6).map(float), NUMBERS), max_size=30), st.booleans())
def test_any_line_chart_is_well_formed(points: list[tuple[float, float]], zero: bool) -> None:
    for form in (units.significant, units.size, units.duration, units.count):
        _svg(line_chart([Series("<a>", points), Series("b", points[:1])], form, zero=zero))


@given(st.lists(st.tuples(st.text(max_size=5), st.floats(0, 1e12)), max_size=40))
def test_any_bar_chart_is_well_formed(bars: list[tuple[str, float]]) -> None:
    _svg(bar_chart([("".join(c for c in label if c.isprintable()), value) for label, value in bars]))


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3), st.integers(0, 80)), max_size=30))
def test_any_timeline_is_well_formed(rows: list[tuple[float, float, int]]) -> None:
    _svg(timeline([span_between("<&>", "forward", start, start + length, rank) for start, length, rank in rows]))


def _svg(text: str) -> None:
    if text.startswith("<svg"):
        root = ET.fromstring(text[: text.index("</svg>") + len("</svg>")])
        for element in root.iter():
            for name in ("x", "y", "width", "height", "x1", "x2", "y1", "y2"):
                assert math.isfinite(float(element.get(name, "0")))


@given(st.floats(-1e15, 1e15), st.floats(0, 1e15))
def test_ticks_enclose_the_range(low: float, width: float) -> None:
    ticks = nice_ticks(low, low + width)
    assert 2 <= len(ticks) <= 9
    slack = 1e-6 * max(abs(low), width, 1e-300)
    assert ticks[0] <= low + slack and ticks[-1] >= low + width - slack
    assert ticks == sorted(set(ticks))


@given(st.lists(st.integers(-100, 100).map(float), min_size=1, max_size=5000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points, limit=50)
    assert len(kept) <= 50 <= MAX_POINTS
    assert kept == sorted(kept)
    assert {min(values), max(values)} <= {value for _, value in kept}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.count(950), "950"),
        (units.count(12_345), "12.3k"),
        (units.count(4.56e6), "4.56M"),
        (units.size(512), "512 B"),
        (units.size(1.5 * 2**30), "1.50 GiB"),
        (units.duration(0), "0 s"),
        (units.duration(350e-6), "350 us"),
        (units.duration(0.0125), "12.5 ms"),
        (units.duration(3.2), "3.20 s"),
        (units.duration(245), "4 min 05 s"),
        (units.duration(7380), "2 h 03 min"),
        (units.significant(0.00012), "1.20e-04"),
        (units.significant(math.nan), "nan"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_a_run_outlives_the_reader_of_its_output() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        say("read", stream)
        os.close(reader)
        with Progress(2, stream=stream) as progress:
            progress.note("not read")
            progress.note("x" * 100_000)
        say("nor this", stream)
    # Neither these lines nor closing the stream failed; what is no closed pipe still does.
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as full:
        say("lost", full)


def test_evaluations_and_restarts_are_in_the_loss_chart(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [STEP | {"step": n, "loss": 6.0 - n} for n in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bare = write_report(tmp_path).read_text()
    assert "held-out documents" not in bare and "began again" not in bare
    lines[1]["eval_loss"], lines[3]["eval_loss"] = 5.0, None
    for line, count in zip(lines, (1, 1, 1, 2, 2), strict=True):
        line["restarts"] = count
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = _Page(write_report(tmp_path).read_text())
    assert "held-out documents" in page.text
    assert "began again at step 4" in page.text and "the run began again at steps 1, 4." in page.text
    assert sum(attributes.get("class") == "mark" for _, attributes in page.tags) == 2


def test_the_line_of_an_evaluation() -> None:
    line = EvaluationLine(step=50, steps=100, loss=3.21, tokens=12345, sequences=1, time_s=1.2)
    assert evaluation_line(line) == "step  50/100  held-out loss 3.2100  12,345 targets in 1 sequence  1.20 s"
