"""kill -9 at ten points of a run, of each rank, of the launcher and of all; then `--resume auto`, and the same curve.

    python -m benchmarks.resuming.kill_matrix [--points forward writing ...] [--json]

Every case kills a run at an exact point, waits until nothing of it is left, resumes it, and compares with the run that
was never interrupted: loss, gradient norm and counts of every step bit for bit, each step once, no file left over.
"""

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.common import hardware
from benchmarks.resuming.runs import Command, curve, metrics, preload, train, write_run

STEP = 4
"""The step in which a run is killed; its checkpoints are those of steps 2, 4 and 6."""
LAYOUTS: dict[str, tuple[object, ...]] = {
    "2 ranks": ("--nproc", 2),
    "3 ranks": ("--nproc", 3, "--plan.strategy", "hdp-naive"),
    "pipeline of 2": ("--nproc", 2, "--parallel.pp_size", 2),
}
CHECKPOINTS = ("--checkpoint.every", 2, "--checkpoint.keep", 1)


@dataclass(frozen=True)
class Case:
    """What became of one kill."""

    layout: str
    point: str
    victim: str
    ended_s: float
    last_step: int
    resumed_after: int
    same: bool


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--points", nargs="*", default=list(POINTS), choices=list(POINTS))
    arguments.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args()
    preload()
    cases = []
    with tempfile.TemporaryDirectory() as name:
        for layout in chosen.layouts:
            directory = Path(name) / layout.replace(" ", "-")
            directory.mkdir()
            config = write_run(directory)
            train([config, *LAYOUTS[layout], "--run.dir", directory / "whole"], directory / "whole.log")
            nproc = int(str(LAYOUTS[layout][1]))
            for point in chosen.points:
                for victim in (*map(str, range(nproc)), "launcher", "all"):
                    cases.append(one_case(directory, config, layout, point, victim))
                    if not chosen.json:
                        print(asdict(cases[-1]), flush=True)
    good, slowest = sum(case.same for case in cases), max(case.ended_s for case in cases)
    summary = {"kills": len(cases), "same": good, "slowest_end_s": round(slowest, 1), "hardware": hardware()}
    print(json.dumps({**summary, "cases": [asdict(case) for case in cases]} if chosen.json else summary))
    raise SystemExit(good != len(cases))


def one_case(directory: Path, config: Path, layout: str, point: str, victim: str) -> Case:
    """Kill, resume, compare."""
    run_dir = directory / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    words = [config, *LAYOUTS[layout], "--run.dir", run_dir, *CHECKPOINTS]
    killed_at = directory / "killed"
    killed_at.unlink(missing_ok=True)
    command = Command(words, directory / "killed.log", partial(kill_at, point, victim, run_dir, killed_at))
    code = command.wait()
    processes = run_dir / "processes.json"
    pids = [entry["pid"] for entry in json.loads(processes.read_text())] if processes.exists() else []
    while any(map(lives, pids)):
        time.sleep(0.01)
    assert code != 0 and killed_at.exists(), command.output()
    ended_s = time.time() - float(killed_at.read_text())
    last_step = len(metrics(run_dir))
    resumed = train([*words, "--resume", "auto"], directory / "resumed.log").output()
    marks = [line for line in resumed.splitlines() if line.startswith("resumed from ")]
    after = int(marks[0].rsplit(" ", 1)[1]) if marks else 0
    same = curve(run_dir) == curve(directory / "whole") and leftovers(run_dir) == []
    return Case(layout, point, victim, round(ended_s, 2), last_step, after, same)


def leftovers(run_dir: Path) -> list[str]:
    """Files that a run that came to its end should not have left."""
    hidden = [str(path) for path in run_dir.rglob(".*")]
    return hidden + [path.name for path in (run_dir / "checkpoints").iterdir() if path.name != "step-000006"]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Killer:
    """Kills the victim of a case, when a rank of the run comes to a point."""

    def __init__(self, run_dir: Path, victim: str, killed_at: Path) -> None:
        self.run_dir, self.victim, self.killed_at = run_dir, victim, killed_at

    @property
    def is_here(self) -> bool:
        """Whether this rank is the one that kills: the victim itself, rank 0 where it is not a rank."""
        return os.environ["RANK"] == (self.victim if self.victim.isdecimal() else "0")

    def kill(self) -> None:
        """Kill, the first time, and wait for one's own end where the victim is another process."""
        if self.killed_at.exists():
            return
        self.killed_at.write_text(str(time.time()))
        if self.victim == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks = {entry["rank"]: entry["pid"] for entry in json.loads((self.run_dir / "processes.json").read_text())}
        others = [pid for pid in ranks.values() if pid != os.getpid()]
        if self.victim in ("launcher", "all"):
            os.kill(os.getppid(), signal.SIGKILL)
        if self.victim == "all":
            for pid in others:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.victim.isdecimal():
            os.kill(ranks[int(self.victim)], signal.SIGKILL)
        time.sleep(60)


def kill_at(point: str, victim: str, run_dir: Path, killed_at: Path) -> None:
    """Patch this process so that its run is killed at `point`, once."""
    POINTS[point](Killer(run_dir, victim, killed_at))


def at(owner: Any, name: str, when: Callable[..., bool], killer: Killer, *, after: bool = False) -> None:
    """Kill when `owner.name` is called, or has returned, and `when` says so of its arguments."""
    function = getattr(owner, name)

    def patched(*args: Any, **options: Any) -> Any:
        if not after and when(*args):
            killer.kill()
        result = function(*args, **options)
        if after and when(*args):
            killer.kill()
        return result

    setattr(owner, name, patched)


def in_step(killer: Killer) -> Callable[[], bool]:
    """Watches which step runs; says whether it is the one to be killed, on the rank that kills."""
    from bytescale.train import trainer

    step = SimpleNamespace(number=0)
    run_step = trainer.run_step

    def watched(*args: Any) -> Any:
        step.number = args[3].step
        return run_step(*args)

    trainer.run_step = watched  # type: ignore[assignment]
    return lambda: step.number == STEP and killer.is_here


def before_the_first_step(killer: Killer) -> None:
    from bytescale.train.trainer import Trainer

    at(Trainer, "_loader", lambda *_: killer.is_here, killer)


def forward(killer: Killer) -> None:
    from bytescale.runtime.model.decoder import LossModel

    is_due = in_step(killer)
    at(LossModel, "forward", lambda *_: is_due(), killer, after=True)


def backward(killer: Killer) -> None:
    import torch

    is_due = in_step(killer)
    at(torch.autograd, "backward", lambda *_: is_due(), killer, after=True)


def reduce(killer: Killer) -> None:
    from bytescale.train import step

    is_due = in_step(killer)
    at(step, "reduce", lambda *_: is_due(), killer)


def optimizer(killer: Killer) -> None:
    import torch

    is_due = in_step(killer)
    at(torch.optim.AdamW, "step", lambda *_: is_due(), killer, after=True)


def staging(killer: Killer) -> None:
    from bytescale.checkpoint.writer import CheckpointWriter

    is_due = in_step(killer)
    at(CheckpointWriter, "_stage", lambda *_: is_due(), killer, after=True)


def writing(killer: Killer) -> None:
    """With half of the file written."""
    from bytescale.checkpoint import writer

    def write_half(path: Path, tensors: Any) -> str:
        digest = write(path, tensors)
        if path.parent.name == f".step-{STEP:06d}.new" and killer.is_here:
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)
            killer.kill()
        return digest

    write, writer.write_tensors = writer.write_tensors, write_half


def published(killer: Killer) -> None:
    """Between the rename and the cleanup."""
    from bytescale.checkpoint import writer

    at(writer, "publish", lambda _, target: target.name == f"step-{STEP:06d}", killer, after=True)


def pruning(killer: Killer) -> None:
    """With half of the old checkpoint removed."""
    from bytescale.checkpoint import directory

    def remove_half(path: Path, **_: Any) -> None:
        if path.name == ".step-000002.old" and path.exists():
            (path / "manifest.json").unlink()
            killer.kill()
        shutil.rmtree(path, ignore_errors=True)

    directory.shutil = SimpleNamespace(rmtree=remove_half)  # type: ignore[assignment]


def exit_(killer: Killer) -> None:
    """After the last checkpoint and the model, before trace and summary."""
    from bytescale.train.reporter import Reporter

    at(Reporter, "write_ending", lambda *_: True, killer)


POINTS: dict[str, Callable[[Killer], None]] = {
    "before the first step": before_the_first_step,
    "forward": forward,
    "backward": backward,
    "reduce": reduce,
    "optimizer": optimizer,
    "staging": staging,
    "writing": writing,
    "published": published,
    "pruning": pruning,
    "exit": exit_,
}
"""Where a run is killed -> what patches it so. Points of rank 0 alone kill the victim from there."""

if __name__ == "__main__":
    main()
