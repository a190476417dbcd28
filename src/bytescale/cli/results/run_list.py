"""The runs below a directory, from their files alone: how far they came, how they ended, whether they can go on.

A run directory is one that holds `config.toml` and `processes.json` or `metrics.jsonl`. A run that is under way holds
a lock on it; one that is over says in `summary.json` how it ended, and failed if it could not. Cost: one walk that
does not enter run directories, and the last lines of every run's metrics, whatever its length.
"""

import fcntl
import json
import math
import os
import socket
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale.checkpoint.directory import MANIFEST, find_checkpoints, step_of
from bytescale.errors import UserError

RUNNING, FINISHED, STOPPED, FAILED, UNKNOWN = "running", "finished", "stopped", "failed", "unknown"
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RunState:
    """A run as its directory shows it.

    Attributes:
        dir: where it lies, as found.
        state: `running`, `finished`, `stopped`, `failed`, or `unknown` where only another machine can tell.
        step: last step in its metrics; 0 before the first.
        steps: steps that it was to have; None where its configuration cannot be read.
        loss: of the last step; None before the first, or where it is no number.
        eval_loss: of the last evaluation.
        written_at: when its last step ended, in seconds since 1970; None before the first.
        checkpoints: steps of its checkpoints, ascending.
        resume_step: step that it can go on from; None where it cannot.
    """

    dir: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    eval_loss: float | None
    written_at: float | None
    checkpoints: tuple[int, ...]
    resume_step: int | None


def find_runs(directory: Path) -> list[RunState]:
    """The runs in `directory` and below it, by name.

    Raises:
        UserError: there is no such directory.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory" if directory.exists() else f"{directory} does not exist")
    return [run_state(run_dir) for run_dir in _run_dirs(directory)]


def run_state(run_dir: Path) -> RunState:
    """What the files of one run say. Files that are missing or broken say nothing."""
    lines = _last_lines(run_dir / "metrics.jsonl")
    last = lines[-1] if lines else {}
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    config = _toml(run_dir / "config.toml")
    summary = _json(run_dir / "summary.json")
    state = _state(run_dir, summary)
    found = find_checkpoints(checkpoint_dir(run_dir, config))
    checkpoints = tuple(sorted(step_of(path) for path in found if (path / MANIFEST).is_file()))
    step, steps = last.get("step", 0), config.get("train", {}).get("steps")
    over = state == FINISHED and steps is not None and step >= steps
    return RunState(
        dir=str(run_dir),
        state=state,
        step=step,
        steps=steps,
        loss=_number(last.get("loss")),
        eval_loss=_number(evaluated[-1] if evaluated else summary.get("eval_loss_last")),
        written_at=_number(last.get("timestamp")),
        checkpoints=checkpoints,
        resume_step=checkpoints[-1] if checkpoints and state != RUNNING and not over else None,
    )


def checkpoint_dir(run_dir: Path, config: dict[str, Any] | None = None) -> Path:
    """Where the checkpoints of a run lie; `config` is what its `config.toml` holds."""
    stated = (_toml(run_dir / "config.toml") if config is None else config).get("checkpoint", {}).get("dir")
    return run_dir / "checkpoints" if stated is None else Path(stated)


def _run_dirs(directory: Path) -> Iterator[Path]:
    for root, names, files in os.walk(directory):
        if "config.toml" in files and ("processes.json" in files or "metrics.jsonl" in files):
            names.clear()
            yield Path(root)
        names[:] = sorted(name for name in names if not name.startswith("."))


def _state(run_dir: Path, summary: dict[str, Any]) -> str:
    if _is_locked(run_dir):
        return RUNNING
    if summary.get("status") in (FINISHED, STOPPED, FAILED):
        return str(summary["status"])
    processes = _json(run_dir / "processes.json", list)
    hosts = {process.get("host") for process in processes[:1] if isinstance(process, dict)}
    # Locks need not reach from machine to machine.
    return FAILED if hosts <= {socket.gethostname()} else UNKNOWN


def _is_locked(run_dir: Path) -> bool:
    """Whether a run holds the directory, as `bytescale.train.run_dir` has it; the look takes an instant."""
    try:
        handle = os.open(run_dir, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The last steps of a metrics file; a line that is cut short is left out."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read().splitlines()[1 if begin else 0 :]
    except OSError:
        return []
    values = map(_parsed, lines)
    return [value for value in values if isinstance(value, dict) and isinstance(value.get("step"), int)]


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _json(path: Path, kind: type[Any] = dict) -> Any:
    try:
        value = _parsed(path.read_bytes())
    except OSError:
        value = None
    return value if isinstance(value, kind) else kind()


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
