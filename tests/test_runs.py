"""The list of runs below a directory."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from bytescale import cli
from bytescale.cli.results.run_list import RunState, find_runs


def a_run(
    run_dir: Path,
    last_step: int = 3,
    status: str | None = None,
    host: str | None = None,
    checkpoints: tuple[int, ...] = (),
) -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text("[train]\nsteps = 10\n")
    (run_dir / "processes.json").write_text(json.dumps([{"rank": 0, "pid": 1, "host": host or socket.gethostname()}]))
    lines = [{"step": n, "loss": 5.0 - n / 10, "timestamp": 1.5e9 + n} for n in range(1, last_step + 1)]
    if last_step >= 2:
        lines[1]["eval_loss"] = 4.9
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    for step in checkpoints:
        checkpoint = run_dir / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    return run_dir


def by_name(directory: Path) -> dict[str, RunState]:
    return {os.path.relpath(run.dir, directory): run for run in find_runs(directory)}


def test_states_and_what_a_run_can_go_on_from(tmp_path: Path) -> None:
    a_run(tmp_path / "b" / "finished", 10, "finished", checkpoints=(5, 10))
    a_run(tmp_path / "b" / "longer", 9, "finished", checkpoints=(9,))
    a_run(tmp_path / "stopped", 3, "stopped", checkpoints=(2, 3))
    a_run(tmp_path / "diverged", 3, "failed")
    a_run(tmp_path / "killed", 3, checkpoints=(2,))
    a_run(tmp_path / "elsewhere", 3, host="another-host")
    a_run(tmp_path / "new", 0)
    a_run(tmp_path / "killed" / "nested", 3)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "config.toml").write_text("")
    (tmp_path / "killed" / "checkpoints" / "step-000003").mkdir()
    running = a_run(tmp_path / "running", 3, "stopped", checkpoints=(1,))
    handle = os.open(running, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    found = by_name(tmp_path)
    os.close(handle)
    assert {name: (run.state, run.resume_step) for name, run in found.items()} == {
        "b/finished": ("finished", None),
        "b/longer": ("finished", 9),
        "diverged": ("failed", None),
        "elsewhere": ("unknown", None),
        "killed": ("failed", 2),
        "new": ("failed", None),
        "running": ("running", None),
        "stopped": ("stopped", 3),
    }
    killed = found["killed"]
    assert (killed.step, killed.steps, killed.loss, killed.eval_loss) == (3, 10, 4.7, 4.9)
    assert (killed.written_at, killed.checkpoints) == (1.5e9 + 3, (2,))
    assert (found["new"].step, found["new"].loss, found["new"].written_at) == (0, None, None)
    assert by_name(tmp_path / "killed") == {".": killed}


@pytest.mark.parametrize("broken", ["", '{"step": 4, "lo', "[]\n", '{"step": "x"}\n', "\0" * 100])
def test_broken_files_say_nothing(tmp_path: Path, broken: str) -> None:
    run_dir = a_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(broken)
    for name in ("summary.json", "processes.json", "config.toml"):
        (run_dir / name).write_text(broken)
    run = by_name(tmp_path)["run"]
    assert (run.state, run.step, run.loss, run.steps) == ("failed", 3, 4.7, None)


def test_only_the_end_of_long_metrics_is_read(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run", 5000)
    run = by_name(tmp_path)["run"]
    assert (run.step, run.eval_loss) == (5000, None)
    (run_dir / "summary.json").write_text(json.dumps({"status": "finished", "eval_loss_last": 4.5}))
    assert by_name(tmp_path)["run"].eval_loss == 4.5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*words: object) -> Any:
        assert cli.main(["runs", *map(str, words)]) == 0
        return capsys.readouterr().out

    assert output(tmp_path) == f"no run in {tmp_path} or below it\n"
    assert output(tmp_path, "--json") == "[]\n"
    name = "a-rather-long-name-of-a-run-" * 8
    a_run(tmp_path / name, 3, "stopped", checkpoints=(1, 2, 3, 30))
    table = output(tmp_path)
    for words in (str(tmp_path / name), "stopped", "3/10", "4.7000", "4.9000", "4: ..., 2, 3, 30", "step 30"):
        assert words in table
    (run,) = json.loads(output(tmp_path, "--json"))
    assert run["dir"] == str(tmp_path / name) and run["resume_step"] == 30
    assert cli.main(["runs", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"bytescale: {tmp_path / 'nowhere'} does not exist\n"
