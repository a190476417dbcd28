"""The run directory: what a run writes there, who may write, and what a failed write looks like.

One run at a time: rank 0 holds a kernel lock on the directory, which falls free when its process dies, however it
dies. Files are whole or absent, and nothing of ours replaces what is not ours: a place that is taken by something else
is refused before the first step.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bytescale.errors import RunError, UserError

MODEL = "model"
_BEGIN = ("config.toml", "processes.json", "metrics.jsonl")
_END = ("trace.json", "summary.json", "report.html")
_LOCK_PATIENCE_S = 2.0


def check_run_dir(run_dir: Path, *, save_model: bool) -> None:
    """Make `run_dir` and see that everything in it can be written.

    Raises:
        UserError: it cannot be made or written, or holds something else where the run would write.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        taken = [name for name in (*_BEGIN, *_END) if (run_dir / name).is_dir()]
        if save_model and not _may_replace(run_dir / MODEL):
            taken.append(MODEL)
    except OSError as error:
        raise UserError(f"run.dir = {run_dir} cannot be written: {error.strerror}") from None
    if taken:
        kind = "not a checkpoint" if taken[0] == MODEL else "a directory"
        raise UserError(
            f"run.dir = {run_dir} holds {taken[0]}, which is {kind} and would have to be replaced; move it away or "
            "choose another run.dir"
        )


def check_unused(run_dir: Path) -> None:
    """Whether no run is writing to `run_dir`, which exists.

    Raises:
        UserError: one is.
    """
    with _locked(run_dir, fcntl.LOCK_SH):
        pass


@contextmanager
def open_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` for one run, on its rank 0, and clear it of what would not belong to this run.

    Results of an earlier run go, and what a killed one left behind; its model stays until this run's is whole.

    Raises:
        UserError: another run holds it.
    """
    with _locked(run_dir, fcntl.LOCK_EX):
        with writing(run_dir):
            for name in _END:
                (run_dir / name).unlink(missing_ok=True)
            for leftover in (path for name in (*_BEGIN, *_END, MODEL) for path in run_dir.glob(f".{name}.*")):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        yield


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


def replace_directory(new: Path, target: Path) -> None:
    """Put the directory `new` in the place of `target`, which is only removed once it is out of the way."""
    if not target.exists():
        new.rename(target)
        return
    if not _may_replace(target):
        raise RunError(f"{target} is not a checkpoint and is not replaced; the model is left in {new}")
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _may_replace(model: Path) -> bool:
    """Whether `model` is absent, an empty directory or a checkpoint."""
    if not model.is_dir() or model.is_symlink():
        return not os.path.lexists(model)
    return (model / "config.json").is_file() or not any(model.iterdir())


@contextmanager
def _locked(run_dir: Path, kind: int) -> Iterator[None]:
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
                        f"run.dir = {run_dir} is in use by another run; choose another run.dir or wait for its end"
                    ) from None
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
