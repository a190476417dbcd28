"""The run directory: what a run writes there, who may write, and what a failed write looks like.

A directory tells the story of one run: one that holds results is refused unless `run.overwrite` says that they may go,
and then all of them go before the first step, model and checkpoints included; or it goes on, from a checkpoint of its
own: then metrics and checkpoints stay. One run at a time: rank 0 holds a kernel lock on the
directory, which falls free when its process dies, however it dies. Files are whole or absent, and nothing of ours
replaces what is not ours: a place that is taken by something else is refused before the first step.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bytescale.checkpoint.directory import find_checkpoints, remove_checkpoint, remove_leftovers, step_of
from bytescale.errors import RunError, UserError
from bytescale.train.resuming.origin import CHECKPOINTS, PROCESSES
from bytescale.train.saving.model_dir import is_interrupted, may_replace, recover

MODEL = "model"
METRICS = "metrics.jsonl"
_BEGIN = ("config.toml", PROCESSES, METRICS)
_WRITERS = ("tensorboard", "wandb")
_END = ("trace.json", "summary.json", "report.html")
_LOCK_PATIENCE_S = 2.0


def check_run_dir(run_dir: Path, *, save_model: bool, overwrite: bool = False, goes_on: bool = False) -> None:
    """Make `run_dir` and see that a run may write there, and can write all that it will.

    A model whose replacement was interrupted is put right on the way.

    Raises:
        UserError: it cannot be made or written, another run is writing there, it holds results and neither `overwrite`
            nor `goes_on` says that they are expected, or it holds something else where the run would write.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        taken = [name for name in (*_BEGIN, *_END) if (run_dir / name).is_dir()]
        if (save_model or overwrite) and not may_replace(run_dir / MODEL):
            taken.append(MODEL)
    except OSError as error:
        raise UserError(f"run.dir = {run_dir} cannot be written: {error.strerror}") from None
    if taken:
        kind = "not a checkpoint" if taken[0] == MODEL else "a directory"
        raise UserError(
            f"run.dir = {run_dir} holds {taken[0]}, which is {kind} and would have to be replaced; move it away or "
            "choose another run.dir"
        )
    interrupted = is_interrupted(run_dir / MODEL)
    with _locked(run_dir, fcntl.LOCK_EX if interrupted else fcntl.LOCK_SH):
        if interrupted:
            with writing(run_dir):
                recover(run_dir / MODEL)
        _check_results(run_dir, overwrite or goes_on)


def _check_results(run_dir: Path, expected: bool) -> None:
    if not expected and (found := results(run_dir)):
        ways = ["choose another run.dir", "set run.overwrite = true to replace all of them"]
        has_checkpoints = bool(find_checkpoints(run_dir / CHECKPOINTS))
        if has_checkpoints:
            ways.insert(0, "go on with --resume auto")
        raise UserError(
            f"run.dir = {run_dir} holds the results of an earlier run ({', '.join(found)})"
            + ("" if has_checkpoints else " and no checkpoint to go on from")
            + f"; {', or '.join(ways)}"
        )


def check_checkpoint_dir(directory: Path, *, overwrite: bool = False, goes_on: bool = False) -> None:
    """Make a directory for checkpoints outside of the run directory, and see that they can be written there.

    Raises:
        UserError: it cannot be made or written, another run is writing there, or it holds checkpoints of another run.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"checkpoint.dir = {directory} cannot be written: {error.strerror}") from None
    if not (overwrite or goes_on) and find_checkpoints(directory):
        raise UserError(
            f"checkpoint.dir = {directory} holds checkpoints of an earlier run; go on with --resume auto, or choose "
            "another checkpoint.dir, or set run.overwrite = true to replace them"
        )


def results(run_dir: Path) -> list[str]:
    """What is worth keeping in `run_dir`: files of a run that came to its first step."""
    metrics = run_dir / METRICS
    found = [METRICS] if metrics.is_file() and metrics.stat().st_size else []
    found += [name for name in (MODEL, *_END) if (run_dir / name).exists()]
    return found + [CHECKPOINTS] * bool(find_checkpoints(run_dir / CHECKPOINTS))


@contextmanager
def open_run_dir(run_dir: Path, *, overwrite: bool = False, goes_on: bool = False) -> Iterator[None]:
    """Hold `run_dir` for one run, on its rank 0, and clear it of all that an earlier run left there.

    A run that goes on keeps metrics, checkpoints and, until it saves its own, the model.

    Raises:
        UserError: another run holds it, or left results there while this one waited and they are not expected.
    """
    with _locked(run_dir, fcntl.LOCK_EX):
        with writing(run_dir):
            recover(run_dir / MODEL)
            _check_results(run_dir, overwrite or goes_on)
            # The model goes last: as long as anything of the earlier run is left, the directory counts as used.
            for name in (*_BEGIN, *_END):
                if not (goes_on and name == METRICS):
                    (run_dir / name).unlink(missing_ok=True)
            for leftover in (path for name in (*_BEGIN, *_END, MODEL) for path in run_dir.glob(f".{name}.*")):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
            for name in _WRITERS if not goes_on else ():
                shutil.rmtree(run_dir / name, ignore_errors=True)
            if not goes_on and may_replace(run_dir / MODEL) and (run_dir / MODEL).exists():
                shutil.rmtree(run_dir / MODEL)
        yield


@contextmanager
def open_checkpoint_dir(directory: Path, last_step: int) -> Iterator[list[str]]:
    """Hold the directory of a run's checkpoints, on its rank 0, and clear it of what does not belong to the run.

    That is what killed runs left half-written, and checkpoints of steps after `last_step`: they are damaged, or of a
    course that is given up.

    Returns:
        Names of the checkpoints that were removed.

    Raises:
        UserError: another run holds it.
    """
    if not directory.is_dir():
        yield []
        return
    with _locked(directory, fcntl.LOCK_EX, "checkpoint.dir"):
        with writing(directory):
            remove_leftovers(directory)
            given_up = [path for path in find_checkpoints(directory) if step_of(path) > last_step]
            for path in given_up:
                remove_checkpoint(path)
        yield [path.name for path in given_up]


def is_seen(path: Path, patience_s: float = 60.0) -> bool:
    """Whether `path`, which another host has just made, shows up here; network file systems may take their time."""
    deadline_s = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the failure to write inside the block into one line that names `path`.

    Raises:
        RunError: the disk is full, or went away.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _locked(run_dir: Path, kind: int, key: str = "run.dir") -> Iterator[None]:
    """Hold a lock on the directory itself; a file system without locks on directories is used unlocked."""
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        deadline_s = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            # A check by another run holds the lock for an instant, so a refusal is worth a second look.
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise UserError(
                        f"{key} = {run_dir} is in use by another run; choose another {key} or wait for its end"
                    ) from None
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
