"""`simulate`, `reproduce` and the simulated part of `compare`, through the command line."""

import csv
import json
from pathlib import Path

import pytest

from bytescale.cli import main
from bytescale.trace import read_trace

PLAN = [
    "plan",
    "--lengths",
    "wlb",
    "--ranks",
    "8",
    "--tokens-per-rank",
    "16K",
    "--batch-tokens",
    "200K",
    "--offload",
    "off",
    "--strategy",
]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "hdp-balance", "--out", str(path)]) == 0
    capsys.readouterr()
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_bare_simulation_gives_the_predicted_step(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed(capsys, "simulate", str(plan_file), "--bare")
    assert isinstance(value, dict)
    assert value["simulated_step_time_s"] == value["step_time_s"]
    assert sum(value["shares"].values()) == pytest.approx(1.0)


def test_overheads_make_a_step_longer(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed(capsys, "simulate", str(plan_file), "--update-ms", "500")
    assert isinstance(value, dict)
    assert value["simulated_step_time_s"] > value["makespan_s"] + 0.5
    assert value["gather_s"] > 0


def test_several_batches_trace_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.svg"
    arguments = ["simulate", "--lengths", "wlb", "--ranks", "4", "--batch-tokens", "100K", "--pp-size", "2"]
    arguments += ["--batches", "2", "--trace", str(trace), "--trace-ranks", "0,2-3", "--plot", str(plot)]
    rows = printed(capsys, *arguments)
    assert isinstance(rows, list)
    assert len(rows) == 2
    assert {span.rank for span in read_trace(trace)} == {0, 2, 3}
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    assert main(arguments) == 0
    assert "trace written to" in capsys.readouterr().out


def test_the_longest_context(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "simulate", "--max-length", "--ranks", "16", "--tp-size", "2")
    assert isinstance(rows, list)
    assert rows[0]["way"] == "no offload"
    assert all(row["binds"] and row["max_length"] > 0 for row in rows)
    fixed = printed(capsys, "simulate", "--max-length", "--ranks", "16", "--tokens-per-rank", "4K")
    assert isinstance(fixed, list)
    assert fixed[0]["max_length"] == 16 * 4096
    assert main(["simulate", "--max-length", "--ranks", "16", "--tp-size", "2"]) == 0
    assert "what binds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "PLAN", "--ranks", "4"], "the plan is for 8 ranks, --ranks is 4"),
        (["simulate", "PLAN", "--model", "llama-70b"], "the plan has 32 layers a rank; this model has 80"),
        (["simulate", "PLAN", "--cluster", "h1000"], "unknown cluster 'h1000'; did you mean 'h100'?"),
        (["simulate", "PLAN", "--model", "lama-7b"], "unknown model 'lama-7b'; did you mean 'llama-7b'?"),
        (["simulate", "PLAN", "--trace-ranks", "a"], "--trace-ranks is 'a'; it is a list such as 0-3,8"),
        (["simulate", "missing.json"], "cannot read plan missing.json"),
        (["simulate", "--lengths", "EMPTY", "--ranks", "4"], "holds no lengths"),
        (["simulate", "--ranks", "4"], "--lengths is missing"),
        (["simulate", "--max-length"], "--ranks is missing"),
        (["simulate", "--max-length", "--ranks", "1", "--model", "llama-70b"], "does not fit"),
        (["reproduce", "fig99"], "unknown figure 'fig99'; did you mean 'fig"),
        (["reproduce", "fig5", "--page", "page.md"], "--page shows all figures"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    named = {"PLAN": str(plan_file), "EMPTY": str(empty)}
    assert main([named.get(word, word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_reproduce_prints_rows_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "fig5", "--out", str(tmp_path)]) == 0
    assert "calibration.toml" in capsys.readouterr().out
    with (tmp_path / "fig5.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 5
    assert (tmp_path / "reproduce-fig5.svg").exists()
    rows = printed(capsys, "reproduce", "fig21")
    assert isinstance(rows, list)
    assert {"figure", "model", "context", "ours"} <= set(rows[0])


def test_fig17_has_exactly_96_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "reproduce", "fig17", "--batches", "1")
    assert isinstance(rows, list)
    assert len(rows) == 96
    assert {row["data"] for row in rows} == {"github", "byted"}
    assert {row["context"] for row in rows} == {"256K", "512K", "1M", "2M"}
    assert {row["system"] for row in rows} == {"hdp-naive", "hdp-balance"}
    assert all(row["figure"] == "fig17" and row["paper"] > 1 and row["ours"] > 0.9 for row in rows)


def test_compare_says_what_a_strategy_loses_to(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--lengths", "wlb", "--ranks", "8", "--batch-tokens", "400K", "--tokens-per-rank", "32K"]
    rows = printed(capsys, *arguments, "--strategies", "static,best")
    assert isinstance(rows, list)
    static, best = rows
    assert static["main_loss"] == "exposed communication" or static["shares"]["compute"] < best["shares"]["compute"]
    assert best["simulated_step_time_s"] == pytest.approx(best["step_time_s"])
