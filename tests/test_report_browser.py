"""The report in a real browser: nothing goes wrong, every chart is drawn, and a phone need not scroll sideways."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.report import write_report, write_summary
from bytescale.trace import span_between, write_trace
from tests.browser import BROWSER, measure
from tests.test_report import STEP, SUMMARY, run_directory

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian's package: chromium)")

PHONE, DESK = 375, 1280
CHARTS = {
    *("Loss", "Tokens per second", "Imbalance", "Micro-batches per rank", "Gradient norm before clipping"),
    *("Peak memory", "Planning and data", "Attention traffic", "Last traced step"),
}


def check(page: Path, charts: set[str]) -> None:
    for measured, width in zip(measure(page, (PHONE, DESK)), (PHONE, DESK), strict=True):
        assert measured["content_width"] <= measured["width"] <= width
        drawn = {chart["title"]: chart["drawings"] for chart in measured["charts"]}
        assert charts <= set(drawn)
        for title in charts:
            (drawing,) = drawn[title]
            assert drawing["shapes"] > 0 and drawing["unpainted"] == 0, title
            assert drawing["width"] > 200 and drawing["height"] > 50, title
            assert drawing["least_text_px"] > 8, title


def test_a_run_with_everything(tmp_path: Path) -> None:
    lines = [
        STEP | {"step": n, "loss": 5.5 - n / 40, "restarts": int(n > 20), "comm_bytes_static": 0} for n in range(1, 90)
    ]
    for line in lines[9::10]:
        line["eval_loss"] = line["loss"] + 0.1
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = ("a note that is long enough to be wider than any telephone, " * 5, "x" * 400)
    versions = (("a-package-with-a-long-name", "1.2.3.dev4+g" + "0" * 60),)
    write_summary(replace(SUMMARY, notes=notes, versions=versions, device="d" * 80), tmp_path / "summary.json")
    (tmp_path / "config.toml").write_text(f'[run]\ndir = "{"x" * 500}"\n')
    spans = [span_between(f"forward {n}", "forward", 1 + n / 10, 1.09 + n / 10, n % 4) for n in range(20)]
    write_trace([*spans, span_between("step 2", "step", 1.0, 3.2, 0)], tmp_path / "trace.json")
    check(write_report(tmp_path), {*CHARTS, "Sequences by cp_degree"})


def test_a_run_that_was_killed_after_a_step(tmp_path: Path) -> None:
    run_directory(tmp_path, 1)
    check(write_report(tmp_path), {*CHARTS, "Steps by largest cp_degree"} - {"Last traced step"})
