"""kill -9 at a sample of the points of `benchmarks/resuming/kill_matrix.py`, and runs that start themselves again."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.resuming.kill_matrix import CHECKPOINTS, kill_at, leftovers
from benchmarks.resuming.runs import curve, metrics, write_run
from tests.train.runs import environment, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

TWO = ("--nproc", 2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and the run that was never interrupted, in `whole`."""
    home = tmp_path_factory.mktemp("kills")
    done = train(write_run(home), *TWO, "--run.dir", home / "whole")
    assert done.returncode == 0, done.stderr
    return home


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("forward", "1"),
        ("optimizer", "all"),
        ("writing", "0"),
        ("published", "launcher"),
        ("pruning", "1"),
        ("exit", "0"),
    ],
)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(home: Path, point: str, victim: str) -> None:
    run_dir, killed_at = home / f"{point}-{victim}", home / f"killed-{point}"
    words = (home / "run.toml", *TWO, "--run.dir", run_dir, *CHECKPOINTS)
    done = train(*words, before=partial(kill_at, point, victim, run_dir, killed_at))
    assert done.returncode == (-signal.SIGKILL if victim in ("launcher", "all") else 1) and killed_at.exists()
    done = train(*words, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert curve(run_dir) == curve(home / "whole")
    assert leftovers(run_dir) == []


def kill_in_steps(steps: tuple[int, ...], marks: Path) -> None:
    """Patch this process so that rank 1 of its run is killed in each of `steps`, once."""
    from bytescale.train import trainer

    run_step = trainer.run_step

    def patched(*args: object) -> object:
        step = args[3].step  # type: ignore[attr-defined]
        mark = marks / str(step)
        if step in steps and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return run_step(*args)  # type: ignore[arg-type]

    trainer.run_step = patched  # type: ignore[assignment]


def test_a_run_starts_itself_again_and_ends_with_the_right_loss(home: Path) -> None:
    run_dir, marks = home / "again", home / "marks"
    marks.mkdir()
    words = (home / "run.toml", *TWO, "--run.dir", run_dir, *CHECKPOINTS, "--restarts", 3)
    # The first one comes before the first checkpoint.
    done = train(*words, before=partial(kill_in_steps, (2, 4, 5), marks))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all("was killed by SIGKILL" in line for line in lines)
    assert lines[-1].endswith("; restart 3 of 3, on 2 ranks")
    assert curve(run_dir) == curve(home / "whole") and leftovers(run_dir) == []
    assert metrics(run_dir)[-1]["restarts"] == 3


def test_restarts_are_bounded_and_may_have_fewer_ranks(home: Path) -> None:
    run_dir, marks = home / "fewer", home / "fewer-marks"
    marks.mkdir()
    words = (home / "run.toml", "--nproc", 3, "--run.dir", run_dir, *CHECKPOINTS, "--restarts", 1, "--min-nproc", 1)
    done = train(*words, before=partial(kill_in_steps, (3, 5), marks))
    first, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert first.endswith("after step 2; restart 1 of 1, on 2 ranks") and last.endswith("SIGKILL after step 4")
    done = train(*words[:-4], "--resume", "auto")
    assert done.returncode == 0 and [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(metrics(run_dir), metrics(home / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


UNDER_TORCHRUN = """
import sys
from pathlib import Path
from bytescale import cli
from tests.train.test_kills import kill_in_steps
kill_in_steps((2, 5), Path(sys.argv[1]))
sys.exit(cli.main(sys.argv[2:]))
"""


def test_torchrun_starts_a_run_again(home: Path) -> None:
    """Its store outlives the attempts, with addresses of ranks that are gone; the first one left no checkpoint."""
    run_dir, marks = home / "torchrun", home / "torchrun-marks"
    marks.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "--max-restarts", "2", "--no-python", sys.executable, "-c", UNDER_TORCHRUN, marks]
    words += ["train", home / "run.toml", "--run.dir", run_dir, *CHECKPOINTS]
    done = subprocess.run([*map(str, words)], env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert curve(run_dir) == curve(home / "whole") and metrics(run_dir)[-1]["restarts"] == 2
