"""One line a step: a live bar above which the lines scroll on a terminal, plain lines anywhere else."""

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bytescale.errors import counted
from bytescale.report import units
from bytescale.report.output import say, silence


@dataclass(frozen=True)
class StepLine:
    """What the line of one step shows; the names are those of the run's metrics."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    cp_degree_max: int
    num_micro_batches_min: int
    num_micro_batches_max: int
    imbalance: float


def progress_line(line: StepLine) -> str:
    """The step as text, e.g. `step 3/20  loss 4.2100  grad_norm 1.30  12.3k tok/s  degrees<=4 ...`."""
    low, high = line.num_micro_batches_min, line.num_micro_batches_max
    width = len(str(line.steps))
    return "  ".join(
        [
            f"step {line.step:>{width}}/{line.steps}",
            f"loss {line.loss:.4f}",
            f"grad_norm {units.significant(line.grad_norm)}",
            f"{units.count(line.tokens_per_s)} tok/s",
            f"degrees<={line.cp_degree_max}",
            f"micro-batches {low}" + (f"-{high}" if high != low else ""),
            f"imbalance {line.imbalance:.2f}",
        ]
    )


@dataclass(frozen=True)
class EvaluationLine:
    """What the line of an evaluation after `step` shows; `tokens` are targets."""

    step: int
    steps: int
    loss: float
    tokens: int
    sequences: int
    time_s: float


def evaluation_line(line: EvaluationLine) -> str:
    """The evaluation as text, e.g. `step  50/100  held-out loss 3.2100  12,345 targets in 37 sequences  1.20 s`."""
    return "  ".join(
        [
            f"step {line.step:>{len(str(line.steps))}}/{line.steps}",
            f"held-out loss {line.loss:.4f}",
            f"{counted(line.tokens, 'target', ',')} in {counted(line.sequences, 'sequence', ',')}",
            units.duration(line.time_s),
        ]
    )


class Progress:
    """Shows steps as they end. Use it on rank 0 alone, as a context manager."""

    def __init__(self, steps: int, *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._bar: Bar | None = None
        if self._stream.isatty():
            self._bar = Bar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream, highlight=False),
                transient=True,
            )
            self._task = self._bar.add_task("training", total=steps)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, line: StepLine) -> None:
        """Print the line of a finished step."""
        self.note(progress_line(line))
        if self._bar is not None:
            self._bar.update(self._task, completed=line.step)

    def evaluated(self, line: EvaluationLine) -> None:
        """Print the line of an evaluation."""
        self.note(evaluation_line(line))

    def note(self, text: str) -> None:
        """Print any other line."""
        if self._bar is None:
            say(text, self._stream)
            return
        try:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        except OSError:
            # The terminal hung up.
            silence(self._stream)
