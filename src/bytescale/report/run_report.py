"""The report of a run directory: `metrics.jsonl`, `summary.json`, `config.toml` and `trace.json` in one HTML file.

Only the metrics are needed; what else is missing is left out. A line cut short by a crash at the end of the metrics is
ignored, a broken line elsewhere is refused by its number. Cost: one pass over the metrics; the file stays under a
megabyte whatever the length of the run (`bytescale.report.svg`).
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytescale.errors import UserError
from bytescale.files import write_text_atomically
from bytescale.report import units
from bytescale.report.page import Chart, page, preformatted
from bytescale.report.summary import RunSummary, read_summary, summary_rows
from bytescale.report.svg import Point, Series, bar_chart, line_chart, timeline
from bytescale.trace import last_step, read_trace

Metrics = list[dict[str, Any]]


def write_report(run_dir: Path) -> Path:
    """Make `run_dir/report.html` from what the run left there.

    Returns:
        The path of the report.

    Raises:
        UserError: there are no metrics, or a file is broken.
    """
    metrics = read_metrics(run_dir / "metrics.jsonl")
    summary_path, config_path, trace_path = (run_dir / n for n in ("summary.json", "config.toml", "trace.json"))
    summary = read_summary(summary_path) if summary_path.exists() else None
    charts = [*_charts(metrics), _degree_chart(metrics, summary), _traffic_chart(metrics, summary)]
    if trace_path.exists():
        note = "Open trace.json in Perfetto for every step that was traced."
        charts.append(Chart("Last traced step", timeline(last_step(read_trace(trace_path))), note, wide=True))
    if summary is not None and summary.notes:
        charts.append(Chart("Notes", preformatted("\n".join(summary.notes)), wide=True))
    if config_path.exists():
        text = config_path.read_text(encoding="utf-8", errors="replace")
        charts.append(Chart("Configuration", preformatted(text), wide=True))
    facts = [*summary_rows(summary), *_identity(summary)] if summary is not None else _facts(metrics)
    report = run_dir / "report.html"
    write_text_atomically(report, page("ByteScale run", str(run_dir), facts, charts))
    return report


def read_metrics(path: Path) -> Metrics:
    """The lines of a metrics file.

    Raises:
        UserError: it cannot be read, holds no step, or a line other than the last is broken.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read metrics {path}: {error.strerror}; is {path.parent} a run directory?") from None
    metrics: Metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or not isinstance(value.get("step"), int):
                raise ValueError("no step")
            metrics.append(value)
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not the metrics of a step") from None
    if not metrics:
        raise UserError(f"{path} holds no step yet")
    return metrics


def _column(metrics: Metrics, key: str) -> list[Point]:
    """(step, value) of every step; what is missing or not a number becomes NaN, which charts leave out."""
    values = [(step["step"], step.get(key)) for step in metrics]
    return [(x, float(y) if isinstance(y, int | float) and not isinstance(y, bool) else math.nan) for x, y in values]


def _charts(metrics: Metrics) -> list[Chart]:
    def one(key: str) -> list[Series]:
        return [Series(key, _column(metrics, key))]

    micro_batches = [
        Series("most of a rank", _column(metrics, "num_micro_batches_max")),
        Series("least of a rank", _column(metrics, "num_micro_batches_min")),
    ]
    waits = [
        Series("planning", _column(metrics, "plan_time_s")),
        Series("waiting for data", _column(metrics, "data_wait_s")),
    ]
    return [
        _loss_chart(metrics),
        Chart("Tokens per second", line_chart(one("tokens_per_s"), units.count, zero=True)),
        Chart(
            "Imbalance",
            line_chart(one("imbalance")),
            "Time of the slowest rank over the mean, waiting excluded; 1 is perfect.",
        ),
        Chart("Micro-batches per rank", line_chart(micro_batches, zero=True)),
        Chart("Gradient norm before clipping", line_chart(one("grad_norm"), zero=True)),
        Chart("Peak memory", line_chart(one("peak_memory_bytes"), units.size), "The largest over the ranks."),
        Chart("Planning and data", line_chart(waits, units.duration, zero=True)),
    ]


def _loss_chart(metrics: Metrics) -> Chart:
    series = [Series("training", _column(metrics, "loss"))]
    if any("eval_loss" in step for step in metrics):
        series.append(Series("held-out documents", _column(metrics, "eval_loss")))
    begun = restarts(metrics)
    marks = [(step, f"began again at step {step}") for step in begun]
    note = f"Dashed: the run began again at step{'s' * (len(begun) > 1)} {', '.join(map(str, begun))}." if begun else ""
    return Chart("Loss", line_chart(series, marks=marks), note)


def restarts(metrics: Metrics) -> list[int]:
    """The first step after each time that the run began again."""
    counts = [step.get("restarts", 0) for step in metrics]
    return [
        step["step"] for step, count, before in zip(metrics, counts, [0, *counts[:-1]], strict=True) if count != before
    ]


def _degree_chart(metrics: Metrics, summary: RunSummary | None) -> Chart:
    if summary is not None:
        bars = [(str(degree), float(number)) for degree, number in summary.sequences_by_degree]
        return Chart("Sequences by cp_degree", bar_chart(bars), "How many ranks served a sequence.")
    steps = Counter(int(y) for _, y in _column(metrics, "cp_degree_max") if math.isfinite(y))
    bars = [(str(degree), float(steps[degree])) for degree in sorted(steps)]
    return Chart("Steps by largest cp_degree", bar_chart(bars))


def _traffic_chart(metrics: Metrics, summary: RunSummary | None) -> Chart:
    series = [Series("sent", _column(metrics, "comm_bytes"))]
    if any("comm_bytes_static" in step for step in metrics):
        series.append(Series("static would send", _column(metrics, "comm_bytes_static")))
    note = "Bytes that attention sent between ranks in a step, recomputation included."
    if summary is not None and summary.comm_bytes_static is not None:
        note += (
            f" In total {units.size(summary.comm_bytes)};"
            f" static would have sent {units.size(summary.comm_bytes_static)}."
        )
    return Chart("Attention traffic", line_chart(series, units.size, zero=True), note)


def _identity(summary: RunSummary) -> list[tuple[str, str]]:
    """Where and with what a run ran, as far as its summary knows."""
    facts = [
        ("started", summary.started_at),
        ("on", " ".join(part for part in (summary.host, summary.device) if part)),
        ("parameters", f"{summary.num_parameters:,}" if summary.num_parameters else ""),
        *((name, version) for name, version in summary.versions),
    ]
    return [(name, value) for name, value in facts if value]


def _facts(metrics: Metrics) -> Sequence[tuple[str, str]]:
    """What the metrics alone tell, for a run that did not end."""
    losses = [y for _, y in _column(metrics, "loss") if math.isfinite(y)]
    speeds = [y for _, y in _column(metrics, "tokens_per_s") if math.isfinite(y)]
    facts = [("last step", f"{metrics[-1]['step']:,}")]
    if losses:
        facts.append(("loss first / last", f"{losses[0]:.4f} / {losses[-1]:.4f}"))
    if speeds:
        facts.append(("tokens/s, mean of steps", units.count(sum(speeds) / len(speeds))))
    return facts
