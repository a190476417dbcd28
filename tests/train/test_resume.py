"""A run that goes on is the run that was never interrupted: bit for bit in one layout, the same batches in another."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.resuming.elastic import signal_in
from bytescale import cli
from bytescale.checkpoint.directory import find_checkpoints
from bytescale.config.overrides import parse_overrides
from bytescale.config.toml import load_config
from bytescale.report import read_summary
from bytescale.train.trainer import run
from tests.processes import CommandProcess
from tests.train.runs import metrics, train, write_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

STEPS = 8
SHORT = ("--nproc", 2, "--train.steps", STEPS)
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "sequences")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the uninterrupted run lies, in `whole`; it has a checkpoint after every second step."""
    home = tmp_path_factory.mktemp("resume")
    path = write_run(home)
    done = train(path, *SHORT, "--run.dir", home / "whole", "--checkpoint.every", 2, "--checkpoint.keep", 99)
    assert done.returncode == 0, done.stderr
    return home


def curve(run_dir: Path) -> list[list[Any]]:
    return [[line[name] for name in SAME] for line in metrics(run_dir)]


def interrupted(home: Path, name: str, step: int) -> Path:
    """A run directory as one that was killed some time after its checkpoint of `step` leaves it."""
    run_dir = home / name
    shutil.copytree(home / "whole", run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    for name in ("trace.json", "summary.json", "report.html"):
        (run_dir / name).unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[step + 1][:20])
    shutil.copytree(run_dir / "checkpoints" / f"step-{step:06d}", run_dir / "checkpoints" / ".step-000099.new")
    return run_dir


def test_the_curve_of_a_run_that_goes_on_is_the_same_bit_for_bit(home: Path) -> None:
    run_dir = interrupted(home, "same", 4)
    done = train(home / "run.toml", *SHORT, "--run.dir", run_dir, "--checkpoint.every", 3, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert curve(run_dir) == curve(home / "whole")
    assert [line["restarts"] for line in metrics(run_dir)] == [0] * 4 + [1] * 4
    # Nothing left over, the two newest kept, all steps counted once.
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["step-000006", "step-000008"]
    ours, theirs = (read_summary(d / "summary.json") for d in (run_dir, home / "whole"))
    same = ("steps", "tokens", "targets", "sequences", "loss_first", "loss_last", "comm_bytes", "sequences_by_degree")
    assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
    assert (ours.restarts, theirs.restarts, ours.status) == (1, 0, "finished")


def test_other_ranks_pipelines_and_plans_make_the_same_steps(home: Path) -> None:
    run_dir = interrupted(home, "other", 2)
    chain: list[tuple[int, str, tuple[Any, ...]]] = [
        (3, "ranks 2 -> 3", ("--nproc", 3, "--plan.strategy", "hdp-naive")),
        (5, "ranks 3 -> 4", ("--nproc", 4, "--parallel.pp_size", 2, "--plan.strategy", "hdp-balance")),
        (6, "parallel.tp_size 1 -> 2", ("--nproc", 4, "--parallel.tp_size", 2)),
        (8, "ranks 4 -> 1", ("--plan.tokens_per_rank", 600, "--checkpoint.async", "false")),
    ]
    for last, change, options in chain:
        words = ("--run.dir", run_dir, "--checkpoint.every", 2, "--resume", "auto", "--train.steps", STEPS)
        done = train(home / "run.toml", *words, *options, before=partial(signal_in, last))
        assert done.returncode == 0, done.stderr
        assert change in done.stdout.split("changed since: ")[1]
    for ours, theirs in zip(metrics(run_dir), metrics(home / "whole"), strict=True):
        assert (ours["tokens"], ours["sequences"]) == (theirs["tokens"], theirs["sequences"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert metrics(run_dir)[-1]["restarts"] == 4


def test_damage_is_named_and_the_one_before_is_used_or_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = interrupted(home, "damaged", 4)
    path = run_dir / "checkpoints" / "step-000004" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    words = (home / "run.toml", *SHORT, "--run.dir", run_dir, "--checkpoint.every", 9)
    done = train(*words, "--resume", path.parent)
    assert (done.returncode, done.stderr) == (
        2,
        f"bytescale: {path} is damaged: its checksum differs from the manifest's\n",
    )
    done = train(*words, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "step-000004 is not used: " in done.stdout and "after step 2" in done.stdout
    assert "removed step-000004" in done.stdout
    assert curve(run_dir) == curve(home / "whole")


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["train", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("bytescale: ")


def test_what_must_not_change_is_refused_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = interrupted(home, "refused", 4)
    other = home / "other.jsonl"
    other.write_text((home / "corpus.jsonl").read_text().replace("beta", "zeta"))
    before = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*"))
    path = run_dir / "checkpoints" / "step-000004"
    words: tuple[Any, ...] = (home / "run.toml", "--nproc", 2, "--run.dir", run_dir)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((), "holds the results of an earlier run (metrics.jsonl, model, checkpoints); go on with --resume auto, or"),
        (("--resume", "off"), "go on with --resume auto, or choose another run.dir"),
        (("--resume", home / "nothing"), "nothing is no checkpoint and holds none; give a directory step-..."),
        (("--resume", run_dir / "checkpoints" / "step-000005"), "is not a checkpoint: it holds no manifest.json"),
        (("--resume", "auto", "--data.path", other), f"{path} was made with other data (digest of lengths and tokens"),
        (("--resume", "auto", "--train.seed", 1), f"{path} was made with train.seed = 0, now it is 1; a run goes on"),
        (("--resume", "auto", "--batch.tokens", 2000), "was made with batch.tokens = 2400, now it is 2000"),
        (("--resume", "auto", "--batch.sequences", 9), "was made with batch.tokens = 2400, now it is absent"),
        (("--resume", path, "--model.config.vocab_size", 300), "was made with model config vocab_size = 272, now"),
        (("--resume", path, "--train.steps", 3), "after step 4, and train.steps = 3: nothing is left to train; raise"),
        (("--resume", home / "whole", "--run.dir", home / "new", "--train.steps", 8), "nothing is left to train"),
        (("--checkpoint.dir", run_dir / "checkpoints", "--run.dir", home / "new", "--checkpoint.every", 1), "earlier"),
        (("--checkpoint.dir", other, "--checkpoint.every", 1, "--run.dir", home / "new"), "be written: File exists"),
        (("--checkpoint.every", 0), "checkpoint.every = 0; it must be at least 1"),
    ]
    for options, expected in cases:
        assert expected in refusal(capsys, *words, *options), options
    assert sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*")) == before


def test_auto_begins_where_there_is_nothing(home: Path) -> None:
    done = train(home / "run.toml", "--train.steps", 1, "--plan.tokens_per_rank", 600, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resumed" not in done.stdout and not (home / "run" / "checkpoints").exists()


def test_a_checkpoint_of_another_run_begins_a_new_one(home: Path) -> None:
    done = train(
        home / "run.toml", *SHORT, "--run.dir", home / "two", "--resume", home / "whole/checkpoints/step-000006"
    )
    assert done.returncode == 0, done.stderr
    assert curve(home / "two") == curve(home / "whole")[6:]


def wait_for_step(process: CommandProcess, run_dir: Path, step: int) -> dict[int, int]:
    """Pids by rank, once `step` is in the metrics."""
    path = run_dir / "metrics.jsonl"
    while not path.is_file() or path.read_bytes().count(b"\n") < step:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    return {entry["rank"]: entry["pid"] for entry in json.loads((run_dir / "processes.json").read_text())}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_scheduler_s_signal_leaves_a_checkpoint_of_that_step(
    home: Path, begin: Callable[..., CommandProcess], number: int, code: int
) -> None:
    run_dir = home / f"signal-{number}"
    words = ("--nproc", 2, "--run.dir", run_dir, "--checkpoint.every", 1000)
    process = begin(home / "run.toml", *words, "--train.steps", 100000)
    wait_for_step(process, run_dir, 2)
    process.send_signal(number)
    out, errors = process.communicate(60)
    assert (process.returncode, errors) == (code, "")
    last = metrics(run_dir)[-1]["step"]
    assert os.listdir(run_dir / "checkpoints") == [f"step-{last:06d}"]
    assert f"stopped after step {last}; " in out and f"go on with --resume auto from step {last}" in out
    done = train(home / "run.toml", *words, "--train.steps", last + 1, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, last + 2))


def no_room(path: Path, tensors: object) -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_costs_the_checkpoint_not_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bytescale.checkpoint.writer.write_tensors", no_room)
    run_dir = home / "full"
    words = ("--run.dir", run_dir, "--checkpoint.every", "2", "--train.steps", "4", "--plan.tokens_per_rank", "600")
    overrides, _ = parse_overrides([*map(str, words)])
    assert run(load_config(home / "run.toml", overrides)) is None
    summary = read_summary(run_dir / "summary.json")
    assert (summary.status, summary.steps, summary.num_failed_checkpoints) == ("finished", 4, 2)
    (first, second) = (note for note in summary.notes if note.startswith("no checkpoint after step "))
    assert first.endswith("rank-00000.safetensors: No space left on device; the run goes on and tries again")
    assert metrics(run_dir)[-1]["failed_checkpoints"] == 1 and "step 4" in second
    assert find_checkpoints(run_dir / "checkpoints") == []
