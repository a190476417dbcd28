"""Offloading through the command line: fewer ranks for the same sequence, limits, refusals, nothing left behind."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bytescale.cli import main
from tests.train.runs import metrics, start, train, write_run

pytestmark = pytest.mark.long

ROOMY = ["--plan.tokens-per-rank", "600"]
TWO_STAGES = ["--nproc", 2, "--parallel.pp_size", 2]
SIX_LAYERS = ["--model.config.num_hidden_layers", 6, "--offload.min_bytes", 1024, "--train.steps", 3]


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of up to 600 tokens; 150 a rank hold them on 4 ranks, with offloading on 2."""
    return write_run(tmp_path_factory.mktemp("offload"))


def run(config_path: Path, name: str, *options: object) -> list[dict[str, Any]]:
    run_dir = config_path.parent / name
    done = train(config_path, "--run.dir", run_dir, "--plan.tokens-per-rank", 150, *SIX_LAYERS, *options)
    assert done.returncode == 0, done.stderr
    return metrics(run_dir)


def test_two_ranks_train_what_needs_four(config_path: Path) -> None:
    expected = run(config_path, "four", "--nproc", 4, "--plan.offload", "off")
    assert max(step["cp_degree_max"] for step in expected) == 4
    assert sum(step["offload_bytes_out"] for step in expected) == 0
    for name, offload in (("ratio", 1.0), ("auto", "auto")):
        found = run(config_path, name, "--nproc", 2, "--plan.offload", offload)
        assert max(step["cp_degree_max"] for step in found) == 2
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert ours["offload_bytes_in"] == ours["offload_bytes_out"] > 0
            assert ours["offload_declined_bytes"] == 0
            assert ours["offload_exposed_s"] > 0
        ours, theirs = (load_file(config_path.parent / d / "model" / "model.safetensors") for d in (name, "four"))
        for key, weight in theirs.items():
            assert (ours[key] - weight).abs().max() <= 1e-3 * weight.abs().max(), key
    tracks = json.loads((config_path.parent / "ratio" / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in tracks if event["name"] == "thread_name"}
    assert {"offload out", "offload in", "offload wait"} <= names


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--offload.limit_bytes", 0], "there is no room in offload.dir, or not within offload.limit_bytes"),
        (["--offload.min_bytes", 2**30], "every tensor is smaller than offload.min_bytes = 1073741824"),
        (["--model.config.num_hidden_layers", 2], "a rank has 2 layers, and the last 2 always stay"),
    ],
    ids=["limit", "floor", "layers"],
)
def test_offloading_that_moves_nothing_is_said_and_counted(
    config_path: Path, options: list[object], reason: str, request: pytest.FixtureRequest
) -> None:
    run_dir = config_path.parent / request.node.callspec.id
    words = ["--plan.offload", 1.0, "--train.steps", 2, "--run.dir", run_dir, *ROOMY]
    done = train(config_path, *SIX_LAYERS, *words, *options)
    assert done.returncode == 0, done.stderr
    found = metrics(run_dir)
    assert all(step["offload_asked_tokens"] > step["offload_bytes_out"] == 0 for step in found)
    assert all((step["offload_declined_bytes"] > 0) == ("limit" in str(options)) for step in found)
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert re.match(r"warning: step 1 was planned with [\d,]+ tokens offloaded, but nothing moved: ", warning)
    assert reason in warning
    assert re.search(r"steps that offloaded nothing +2\s", done.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan.offload", "1.5"], "plan.offload = 1.5; a ratio lies in 0..1"),
        (["--plan.offload", "0.5", *ROOMY, "--offload.dir", "{file}/there"], "cannot be made: Not a directory"),
        (["--plan.offload", "0.5", *ROOMY, "--offload.dir", "/proc/1"], "offload.dir = /proc/1 cannot be written"),
        (["--plan.offload", "off"], "needs 2 ranks of plan.tokens_per_rank = 300, but there is 1: start 2 ranks, or"),
        (["--plan.profile", "{file}"], "is not JSON"),
        (["--plan.profile", "nowhere.json"], "nowhere.json: No such file or directory"),
    ],
)
def test_refusals_are_one_line(
    config_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    words = [word.format(file=config_path) for word in options]
    assert main(["train", str(config_path), "--run.dir", str(config_path.parent / "refused"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (2, [], "= 300, but there is 1: start 2 ranks, or raise tokens_per_rank to 600"),
        (6, [], "raise tokens_per_rank to 600, or set plan.offload = 1.0"),
        (6, ["--plan.tokens_per_rank", 100], "start 6 ranks, or raise tokens_per_rank to 600"),
        (4, TWO_STAGES, "= 300, but there is 1: start 4 ranks, or raise tokens_per_rank to 600"),
        (6, [*TWO_STAGES, "--plan.tokens_per_rank", 400], "to 600, or set plan.offload = 1.0"),
    ],
)
def test_offloading_is_advised_only_where_it_helps(
    config_path: Path, capsys: pytest.CaptureFixture[str], layers: int, options: list[object], message: str
) -> None:
    words = ["--model.config.num_hidden_layers", layers, "--plan.offload", "off", *options]
    assert main(["train", str(config_path), *map(str, words)]) == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_killed_run(config_path: Path, number: int) -> None:
    directory = config_path.parent / f"room-{number}"
    run_dir = config_path.parent / f"killed-{number}"
    options = ["--plan.offload", 1.0, "--offload.dir", directory, "--run.dir", run_dir, "--plan.tokens-per-rank", 600]
    process = start(config_path, *options, *SIX_LAYERS, "--train.steps", 10_000)
    try:
        _wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text())
        links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink()]
        # The file is there, and it has no name.
        assert [link for link in links if link.startswith(str(directory)) and link.endswith("(deleted)")]
        assert list(directory.iterdir()) == []
        process.send_signal(number)
        assert process.wait(20) != 0
        assert list(directory.iterdir()) == []
    finally:
        process.kill()
        process.wait(10)


def _wait_for(condition: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
