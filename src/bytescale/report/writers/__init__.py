"""The metrics of a run for other programs to show: what `metrics.jsonl` gets, in files of their own kind.

A writer is a module here with one function `open_writer(run_dir, config)`. Its package is an extra of its own and is
imported when the writer opens. Invariants: files only, nothing leaves the machine; a writer that fails while the run
is under way is left out from then on, with one line, and costs no step.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bytescale.errors import RunError, UserError

Line = Mapping[str, Any]
"""A line of `metrics.jsonl`."""


class MetricsWriter(Protocol):
    """What writes the metrics of one run."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add the numbers of a step that ended at `time_s`, in seconds since 1970."""
        ...

    def close(self) -> None:
        """Bring everything to its file."""
        ...


def check_writers(names: Sequence[str]) -> None:
    """Whether the packages of the writers are installed.

    Raises:
        UserError: one is not; names the extra that brings it.
    """
    for name in names:
        package = find_spec(name)
        # Without origin it is a directory of that name, such as those that the writers make.
        if package is None or package.origin is None:
            raise UserError(f"run.writers: {name} is not installed: pip install 'bytescale[{name}]'")


@contextmanager
def open_writers(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any]
) -> Iterator[Callable[[Line], list[str]]]:
    """A function that hands a line of the metrics to all writers, and says which of them failed at it.

    Args:
        names: `tensorboard`, `wandb`.
        run_dir: each writes to the directory of its name there.
        config: the run, for writers that store it.

    Raises:
        RunError: a writer cannot be opened.
    """
    opened: dict[str, MetricsWriter] = {}

    def write(line: Line) -> list[str]:
        failures = []
        for name in list(opened):
            try:
                opened[name].write(line["step"], line["timestamp"], numbers(line))
            except Exception as error:
                _close(opened.pop(name))
                why = _reason(error)
                failures.append(f"warning: step {line['step']}: {name} cannot write, and is left out from here: {why}")
        return failures

    try:
        for name in names:
            opened[name] = _open(name, run_dir, config)
        yield write
    finally:
        for writer in opened.values():
            _close(writer)


def numbers(line: Line) -> dict[str, float]:
    """The finite numbers of a step by name, `sources/NAME/tokens` of tables in it; its own number and time aside."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif name not in ("step", "timestamp") and isinstance(value, int | float) and not isinstance(value, bool):
            found |= {name: float(value)} if math.isfinite(value) else {}
    return found


def _open(name: str, run_dir: Path, config: Mapping[str, Any]) -> MetricsWriter:
    try:
        module = importlib.import_module(f"bytescale.report.writers.{name}")
        writer: MetricsWriter = module.open_writer(run_dir, config)
    except Exception as error:
        raise RunError(f"run.writers: {name} cannot begin in {run_dir}: {_reason(error)}") from error
    return writer


def _close(writer: MetricsWriter) -> None:
    with suppress(Exception):
        writer.close()


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
