"""`simulate`, `reproduce` and the simulated part of `compare`, through the command line."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.cli import main
from bytescale.cost.model import ModelShape
from bytescale.cost.profile import write_profile
from bytescale.simulator.memory import state_bytes
from bytescale.trace import read_trace
from tests.cost.test_profile import profile

SMALL = ModelShape("small", 4, 256, 4, 2, 64, 704, 272)

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


def test_a_plan_made_for_another_machine_is_said(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(plan_file)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["simulate", str(plan_file), "--tp-size", "2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "the plan was predicted to take" in line and "on llama-7b on h100, tp 2: it was made with another" in line


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


def stored_profile(directory: Path, device: str) -> Path:
    """A profile of a model that is no preset."""
    path = directory / f"{device}.json"
    write_profile(replace(profile(), model=SMALL, device=device), path)
    return path


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_brings_its_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    path, plan = str(stored_profile(tmp_path, device)), tmp_path / "small.json"
    batch = ["--lengths", "wlb", "--ranks", "4", "--batch-tokens", "20K", "--profile", path]
    drawn = printed(capsys, "simulate", *batch)
    printed(capsys, "plan", *batch, "--out", str(plan))
    stored = printed(capsys, "simulate", str(plan), "--profile", path)
    for value in (drawn, stored):
        assert isinstance(value, dict)
        assert value["state_bytes"] == state_bytes(SMALL, tp_size=1, pp_size=1, hdp_size=4)
        # Of the link that was measured between the four ranks of a node, not of the preset cluster.
        assert value["gather_s"] == pytest.approx(0.75 * 2 * SMALL.num_parameters / 1e10 + 2e-5, rel=1e-3)
        assert (value["mfu"] is None) == (value["fits"] is None) == (device == "cpu")
    assert main(["simulate", *batch]) == 0
    assert ("%" in _mfu_cell(capsys.readouterr().out)) == (device == "cuda")
    limits = printed(capsys, "simulate", "--max-length", "--ranks", "4", "--tokens-per-rank", "1K", "--profile", path)
    assert isinstance(limits, list)
    assert [limit["max_length"] for limit in limits] == [4096, limits[1]["max_length"], 8192]


def _mfu_cell(output: str) -> str:
    """What stands below the end of "MFU"; the table aligns it to the right."""
    lines = [line for line in output.splitlines() if line.strip()]
    header = next(line for line in lines if "MFU" in line)
    end = header.index("MFU") + 3
    return lines[-1][end - 5 : end]


def test_counted_flops_have_no_utilisation(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--lengths", "wlb", "--ranks", "4", "--batch-tokens", "100K"]
    counted, preset = (printed(capsys, "simulate", *batch, *more) for more in (["--cost", "dense-flops"], []))
    assert isinstance(counted, dict) and isinstance(preset, dict)
    assert counted["mfu"] is None and preset["mfu"] > 0


def test_what_does_not_fit_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["simulate", "--lengths", "wlb", "--ranks", "8", "--batch-tokens", "200K", "--tokens-per-rank"]
    assert main([*batch, "32K"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line]
    assert line.startswith("does not fit: the fullest GPU needs ") and ", h100 GPUs have 74.5 GiB; raise" in line
    assert main([*batch, "4K", "--tp-size", "4"]) == 0
    assert "does not fit" not in capsys.readouterr().out
    value = printed(capsys, *batch, "32K")
    assert isinstance(value, dict)
    assert (value["fits"], value["gpu_memory_bytes"]) == (False, 80e9)


def test_slow_ranks_are_simulated_as_they_were_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = tmp_path / "speeds.txt"
    speeds.write_text("1 1 1 0.5")
    batch = ["--lengths", "wlb", "--ranks", "4", "--batch-tokens", "100K", "--rank-speed", str(speeds), "--bare"]
    value = printed(capsys, "simulate", *batch)
    assert isinstance(value, dict)
    assert value["simulated_step_time_s"] == pytest.approx(value["step_time_s"])


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
        (["simulate", "PLAN", "--ranks", "8"], "--ranks says how to plan, and PLAN is planned already"),
        (["simulate", "PLAN", "--strategy", "best", "--pp-size", "2"], "--pp-size, --strategy say how to plan"),
        (["simulate", "PLAN", "--batches", "1", "--seed", "0"], "--seed, --batches say how to plan"),
        (["simulate", "PLAN", "--max-length"], "--max-length asks for no step: leave PLAN out"),
        (["simulate", "--max-length", "--ranks", "4", "--profile", "PROFILE"], "needs --tokens-per-rank"),
        (
            ["simulate", "PLAN", "--profile", "PROFILE"],
            "the plan has 32 layers a rank; this model has 4 on 1 stage, 4 a",
        ),
        (["simulate", "PLAN", "--model", "llama-70b"], "the plan has 32 layers a rank; this model has 80"),
        (["simulate", "PLAN", "--cluster", "h1000"], "unknown cluster 'h1000'; did you mean 'h100'?"),
        (["simulate", "PLAN", "--model", "lama-7b"], "unknown model 'lama-7b'; did you mean 'llama-7b'?"),
        (["simulate", "PLAN", "--trace-ranks", "a"], "--trace-ranks is 'a'; it is a list such as 0-3,8"),
        (["simulate", "PLAN", "--trace-ranks", "3-0"], "--trace-ranks is '3-0'; it is a list such as 0-3,8"),
        (["simulate", "PLAN", "--trace-ranks", "0"], "--trace-ranks chooses ranks of --trace and --plot"),
        (["simulate", "PLAN", "--trace-ranks", "8,9", "--trace", "t.json"], "no rank of the plan; its ranks are 0-7"),
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
    named = {"PLAN": str(plan_file), "EMPTY": str(empty), "PROFILE": str(stored_profile(tmp_path, "cpu"))}
    assert main([named.get(word, word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_fig17_has_96_rows_and_says_how_far_it_is_on_standard_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "fig17", "--batches", "1", "--jobs", "1", "--json"]) == 0
    printed_out, said = capsys.readouterr()
    lines = said.splitlines()
    assert lines[0] == "fig17: Speedup over static of six models"
    assert "llama-7b github 256K" in lines and len(lines) > 6
    rows = json.loads(printed_out)
    assert len(rows) == 96
    assert {row["data"] for row in rows} == {"github", "byted"}
    assert {row["context"] for row in rows} == {"256K", "512K", "1M", "2M"}
    assert {row["system"] for row in rows} == {"hdp-naive", "hdp-balance"}
    assert all(row["figure"] == "fig17" and row["paper"] > 1 and row["ours"] > 0.9 for row in rows)
    assert main(["reproduce", "fig5"]) == 0
    printed_out, said = capsys.readouterr()
    assert said == "fig5: Bubbles of unequal micro-batches\n"
    assert "micro-batches" in printed_out and said.strip() not in printed_out.splitlines()


def test_reproduce_prints_rows_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "fig5", "--out", str(tmp_path)]) == 0
    assert "calibration.toml" in capsys.readouterr().out
    with (tmp_path / "fig5.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 5
    assert (tmp_path / "reproduce-fig5.svg").exists()
    rows = printed(capsys, "reproduce", "fig21")
    assert isinstance(rows, list)
    assert {"figure", "model", "context", "ours"} <= set(rows[0])


def test_compare_says_what_a_strategy_loses_to(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--lengths", "wlb", "--ranks", "8", "--batch-tokens", "400K", "--tokens-per-rank", "32K"]
    rows = printed(capsys, *arguments, "--strategies", "static,best")
    assert isinstance(rows, list)
    static, best = rows
    assert static["main_loss"] == "exposed communication" or static["shares"]["compute"] < best["shares"]["compute"]
    assert best["simulated_step_time_s"] == pytest.approx(best["step_time_s"])
