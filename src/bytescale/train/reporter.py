"""What rank 0 shows and writes of a run: lines on the screen, the files of the run directory.

`config.toml` and `processes.json` are written before the first step, `metrics.jsonl` line by line, trace and summary at
the end, also of a run that was stopped or failed: `summary.json` says which.
"""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from bytescale.checkpoint.writer import Saved
from bytescale.config.schema import Config
from bytescale.config.toml import config_to_dict, write_config
from bytescale.data import StepData
from bytescale.errors import counted
from bytescale.files import shown, write_text_atomically
from bytescale.report import EvaluationLine, Progress, RunIdentity, StepLine, write_summary
from bytescale.report.writers import Line, open_writers
from bytescale.runtime.world import World
from bytescale.trace import Span, write_trace
from bytescale.train.agreement import versions
from bytescale.train.evaluation.evaluate import Evaluation
from bytescale.train.measure.metrics import MetricsFile, StepMetrics, last_restarts
from bytescale.train.measure.timeline import shift_to_zero
from bytescale.train.offload import why_nothing_moved
from bytescale.train.prepare import Prepared
from bytescale.train.resuming.origin import checkpoint_dir
from bytescale.train.resuming.start import Start
from bytescale.train.run_dir import open_checkpoint_dir, open_run_dir, writing
from bytescale.train.summary import RunTotals

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


class Reporter:
    """The voice of a run; `open_reporter` makes it, on rank 0.

    Attributes:
        last_saved: the step of the newest checkpoint of this process; None before the first.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        totals: RunTotals,
        metrics_file: MetricsFile,
        progress: Progress,
        write_elsewhere: Callable[[Line], list[str]],
    ) -> None:
        self._config, self._prepared = config, prepared
        self._totals, self._metrics_file, self._progress = totals, metrics_file, progress
        self._write_elsewhere = write_elsewhere
        self._run_dir = Path(config.run.dir)
        self._warned: set[str] = set()
        self._has_ended = False
        self._checkpoint_wait_s = 0.0
        self.last_saved: int | None = None

    def note(self, text: str) -> None:
        """Show a line now, and again in the report."""
        self._progress.note(text)
        self._totals.notes.append(text)

    def step(self, data: StepData, metrics: StepMetrics, evaluation: Evaluation | None = None) -> None:
        """Write and show a step that has ended, and the evaluation that followed it."""
        line = metrics.to_json() | {
            "comm_bytes_static": data.static_bytes,
            "timestamp": round(time.time(), 3),
            "restarts": self._totals.restarts,
            "checkpoint_wait_s": self._checkpoint_wait_s,
            "failed_checkpoints": self._totals.num_failed_checkpoints,
        }
        self._checkpoint_wait_s = 0.0
        given = self._prepared.dataset.given(data.batch.sequence_ids)
        if len(given) > 1:
            line["sources"] = {name: {"sequences": sequences, "tokens": t} for name, (sequences, t) in given.items()}
        if evaluation is not None:
            line |= evaluation.to_json()
        self._metrics_file.write(line)
        for failure in self._write_elsewhere(line):
            self.note(failure)
        self._totals.add(data, metrics, evaluation)
        names = {field.name for field in fields(StepLine)}
        values = {name: value for name, value in asdict(metrics).items() if name in names}
        self._progress.show(StepLine(steps=self._config.train.steps, **values))
        if evaluation is not None:
            self._progress.evaluated(EvaluationLine(metrics.step, self._config.train.steps, **asdict(evaluation)))
        for kind, warning in self._warnings(metrics):
            if warning is not None and kind not in self._warned:
                self._warned.add(kind)
                self.note(warning)

    def _warnings(self, metrics: StepMetrics) -> Iterator[tuple[str, str | None]]:
        """What deserves a line the first time that it happens."""
        yield "offload", why_nothing_moved(self._config, metrics, max(map(len, self._prepared.stages)))
        if self._config.plan.strategy == "chunked" and metrics.chunks_max == 1:
            yield "chunked", f"strategy chunked: step {metrics.step} runs every sequence whole, no chunk pays there"
        if not metrics.is_finite:
            yield "nonfinite", f"step {metrics.step}: loss or gradients are not finite, so its update was left out"

    def totals(self) -> dict[str, Any]:
        """The sums over the steps so far, for a checkpoint."""
        return self._totals.to_dict()

    @property
    def restarts(self) -> int:
        """How often the run has begun again."""
        return self._totals.restarts

    def bring_to_disk(self) -> None:
        """Bring the lines of all steps to the disk.

        Raises:
            OSError: that failed.
        """
        self._metrics_file.sync()

    def waited_for_checkpoint(self, seconds: float) -> None:
        """A step waited so long; the next line says it."""
        self._checkpoint_wait_s += seconds

    def checkpoint(self, saved: Saved) -> None:
        """A checkpoint has been published, or could not be written."""
        if saved.failure is None:
            self.last_saved = saved.step
            return
        self._totals.add_failed_checkpoint()
        self.note(f"no checkpoint after step {saved.step}: {saved.failure}; the run goes on and tries again")

    def write_ending(self, status: str, traces: Iterable[Sequence[Span]]) -> None:
        """Trace and summary, and one line if the run ended early; later requests change nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        model = self._run_dir / "model"
        saved = f"model saved in {shown(model)}" if self._config.run.save_model else "no model saved (run.save_model)"
        if status == STOPPED:
            go_on = f"; go on with --resume auto from step {self.last_saved}" if self.last_saved is not None else ""
            self.note(f"stopped after step {self._totals.num_steps}; {saved}{go_on}")
        elif self._config.plan.strategy == "chunked" and self._totals.num_chunked_steps == 0:
            self.note(f"strategy chunked made no chunk in {counted(self._totals.num_steps, 'step')}")
        with writing(self._run_dir):
            write_trace(shift_to_zero([span for spans in traces for span in spans]), self._run_dir / "trace.json")
            write_summary(self._totals.summary(status), self._run_dir / "summary.json")


@contextmanager
def open_reporter(
    config: Config,
    prepared: Prepared,
    world: World,
    identities: Sequence[Mapping[str, Any]],
    num_parameters: int,
    start: Start,
) -> Iterator[Reporter]:
    """Hold the run directory and say what the run begins with."""
    run_dir, origin = Path(config.run.dir), start.origin
    last_step = start.step if origin.goes_on else 0
    with ExitStack() as stack:
        overwrite = config.run.overwrite or origin.may_clear
        stack.enter_context(open_run_dir(run_dir, overwrite=overwrite, goes_on=origin.goes_on))
        given_up = stack.enter_context(open_checkpoint_dir(checkpoint_dir(config), last_step))
        with writing(run_dir):
            write_config(config, run_dir / "config.toml")
            write_text_atomically(run_dir / "processes.json", json.dumps(identities, indent=1) + "\n")
        path = run_dir / "metrics.jsonl"
        # Several attempts may have begun at one checkpoint, which knows only of those before it.
        restarts = max(start.restarts, last_restarts(path) + 1) if origin.goes_on else start.restarts
        metrics_file = stack.enter_context(MetricsFile(path, last_step))
        progress = stack.enter_context(Progress(config.train.steps))
        identity = run_identity(config, world, num_parameters)
        totals = RunTotals(identity, prepared.dataset, start.totals, restarts)
        writers = open_writers(config.run.writers, run_dir, config_to_dict(config))
        reporter = Reporter(config, prepared, totals, metrics_file, progress, stack.enter_context(writers))
        removed = (f"removed {', '.join(given_up)}: not of this course of the run",) if given_up and last_step else ()
        for note in (*prepared.lines, *start.notes, *removed):
            reporter.note(note)
        yield reporter


def run_identity(config: Config, world: World, num_parameters: int) -> RunIdentity:
    """What a run is, as far as it is known when it begins."""
    cuda = world.device.type == "cuda"
    return RunIdentity(
        world_size=world.size,
        pp_size=world.pp_size,
        host=platform.node(),
        device=torch.cuda.get_device_name(world.device) if cuda else f"cpu ({platform.machine()})",
        started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        num_parameters=num_parameters,
        seed=config.train.seed,
        versions=tuple(sorted(versions().items())),
    )
