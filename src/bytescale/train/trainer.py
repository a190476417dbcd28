"""`check` and `run`: a training run from configuration to report.

Data flows one way: lengths -> plan -> pieces -> micro-batches -> gradients. The loader's thread draws and plans step
n + 1 while step n computes. Rank 0 writes the run directory; files are whole or absent.
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import torch

from bytescale.config.schema import Config
from bytescale.config.toml import write_config
from bytescale.data import StepData, StepLoader
from bytescale.errors import RunError
from bytescale.files import write_text_atomically
from bytescale.report import Progress, StepLine, write_summary
from bytescale.runtime.attention.kernels import AttentionKernel, select_kernel
from bytescale.runtime.fsdp import TORCH_DTYPES, clip_gradients, gradient_norm, shard_model
from bytescale.runtime.model.checks import probe
from bytescale.runtime.model.decoder import LossModel, build_decoder, import_architecture, recompute_layers
from bytescale.runtime.model.hf_config import load_config
from bytescale.runtime.model.stages import cut_to_stage
from bytescale.runtime.offload.offloader import Offloader
from bytescale.runtime.p2p import collective, first_line
from bytescale.runtime.world import World, open_world, process_identity
from bytescale.trace import Span, write_trace
from bytescale.train.checkpoint import save_model
from bytescale.train.metrics import MetricsFile, StepMetrics, gather_metrics
from bytescale.train.offload import open_offloader, why_nothing_moved
from bytescale.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from bytescale.train.peak_memory import peak_memory_bytes, reset_peak_memory
from bytescale.train.prepare import Prepared, prepare, static_bytes
from bytescale.train.run_dir import open_run_dir, writing
from bytescale.train.step import run_step
from bytescale.train.summary import RunTotals
from bytescale.train.timeline import group_by_pipeline, shift_to_zero, to_wall_clock

NUM_TRACED_STEPS = 3
"""The last steps of a run whose timeline is kept."""


def check(config: Config, world_size: int) -> None:
    """Every check that needs no ranks.

    Raises:
        UserError: the run cannot work; one line.
    """
    prepare(config, world_size)


def preload(config: Config) -> None:
    """Import what ranks of this run need, without computing, so that ranks forked from this process share it.

    Raises:
        UserError: the model's configuration cannot work.
    """
    import_architecture(load_config(config.model, config.data.max_context))


def run(config: Config) -> None:
    """Train as this rank of the run that torchrun describes, or as the only one.

    Raises:
        UserError: bad configuration or data.
        CommunicationError: another rank is gone or late.
        RunError: training diverged, the disk is full, or memory is.
    """
    if config.train.compute_threads is not None:
        torch.set_num_threads(config.train.compute_threads)
    with open_world(config.run.comm_timeout_s, config.parallel.pp_size) as world, _memory_in_words(world.rank):
        prepared = prepare(config, world.size)
        dtype = TORCH_DTYPES[config.train.dtype]
        kernel = select_kernel(world.device, dtype)
        model = build_model(config, prepared, world.stage)
        shard_model(model, world.group, world.device, dtype)
        # Posting a transfer to a rank that is gone fails at once, wherever it is posted.
        with open_offloader(config, model, world) as offloader, collective(world.rank, "an exchange"):
            _Run(config, prepared, world, model, kernel, offloader).train()


@contextmanager
def _memory_in_words(rank: int) -> Iterator[None]:
    """Turn the lack of memory inside the block into one line with the ways out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise RunError(
            f"rank {rank} ran out of memory ({first_line(error)}); lower plan.tokens_per_rank, set "
            'train.activation_checkpointing = "full" or start more ranks'
        ) from error


def build_model(config: Config, prepared: Prepared, stage: int = 0) -> LossModel:
    """This stage of the model in fp32 on the CPU, equal on all its ranks; the whole model is probed first."""
    decoder = build_decoder(config.model, prepared.model_config, config.train.seed)
    probe(decoder, config.data.max_context)
    decoder.train()
    is_first, is_last = stage == 0, stage == len(prepared.stages) - 1
    cut_to_stage(decoder, prepared.stages[stage], is_first=is_first, is_last=is_last)
    if config.train.activation_checkpointing == "full":
        recompute_layers(decoder)
    return LossModel(decoder, is_first=is_first, is_last=is_last)


class _Run:
    """The state of a running training: model, optimizer, files, sums."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        world: World,
        model: LossModel,
        kernel: AttentionKernel,
        offloader: Offloader | None,
    ) -> None:
        self.config, self.prepared, self.world = config, prepared, world
        self.model, self.kernel, self.offloader = model, kernel, offloader
        self.optimizer = make_optimizer(model, config.train)
        self.run_dir = Path(config.run.dir)
        self.warned = False
        self.traced: deque[tuple[Span, ...]] = deque(maxlen=NUM_TRACED_STEPS)
        self.totals = RunTotals(world.size, world.pp_size, prepared.dataset.counts)

    @property
    def leads(self) -> bool:
        return self.world.rank == 0

    def train(self) -> None:
        """All steps, then the files that close a run."""
        with collective(self.world.rank, "starting the run"):
            identities = self.world.gather_objects(process_identity(self.world.rank))
        with ExitStack() as stack:
            if self.leads:
                stack.enter_context(open_run_dir(self.run_dir, overwrite=self.config.run.overwrite))
                with writing(self.run_dir):
                    write_config(self.config, self.run_dir / "config.toml")
                    write_text_atomically(self.run_dir / "processes.json", json.dumps(identities, indent=1) + "\n")
                metrics_file = stack.enter_context(MetricsFile(self.run_dir / "metrics.jsonl"))
                progress = stack.enter_context(Progress(self.config.train.steps))
                for note in (self.prepared.dataset.counts.describe(), *self.prepared.notes):
                    progress.note(note)
            loader = stack.enter_context(self._loader())
            for data in loader:
                metrics = self._step(data)
                if self.leads:
                    sent_by_static = self._static_bytes(data)
                    metrics_file.write(asdict(metrics) | {"comm_bytes_static": sent_by_static})
                    progress.show(self._line(metrics))
                    self._warn(progress, metrics)
                    self.totals.add(data, metrics, sent_by_static)
            self._finish(loader.skipped_steps)

    def _warn(self, progress: Progress, metrics: StepMetrics) -> None:
        """Say it the first time that a step offloads nothing although its plan counts on it."""
        warning = why_nothing_moved(self.config, metrics, max(map(len, self.prepared.stages)))
        if warning is not None and not self.warned:
            progress.note(warning)
            self.warned = True

    def _line(self, metrics: StepMetrics) -> StepLine:
        shown = {field.name for field in fields(StepLine)}
        values = {name: value for name, value in asdict(metrics).items() if name in shown}
        return StepLine(steps=self.config.train.steps, **values)

    def _static_bytes(self, data: StepData) -> int | None:
        checkpointing = self.config.train.activation_checkpointing == "full"
        return static_bytes(self.prepared, data.batch.lengths, checkpointing=checkpointing)

    def _loader(self) -> StepLoader:
        return StepLoader(
            self.prepared.dataset,
            self.config.batch,
            self.config.train.seed,
            self.prepared.planner,
            self.world.hdp_rank,
            num_steps=self.config.train.steps,
        )

    def _step(self, data: StepData) -> StepMetrics:
        begin_ns = time.perf_counter_ns()
        reset_peak_memory(self.world.device)
        result = run_step(self.model, self.kernel, self.world, data, self.offloader)
        rate = learning_rate(data.step, self.config.train)
        set_learning_rate(self.optimizer, rate)
        with collective(self.world.rank, f"step {data.step}: gradient norm"):
            grad_norm = self._gradient_norm()
            _check_finite(data.step, "gradient norm", grad_norm)
            clip_gradients(self.model, grad_norm, self.config.train.grad_clip)
        update_ns = time.perf_counter_ns()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end_ns = time.perf_counter_ns()
        step_span = Span(f"step {data.step}", "step", begin_ns, end_ns - begin_ns, self.world.rank, track="step")
        update = Span("update", "update", update_ns, end_ns - update_ns, self.world.rank)
        self.traced.append((step_span, *result.spans, update))
        with collective(self.world.rank, f"step {data.step}: metrics"):
            metrics = gather_metrics(
                self.world,
                data,
                result,
                grad_norm=grad_norm,
                lr=rate,
                step_time_s=data.data_wait_s + (end_ns - begin_ns) / 1e9,
                peak_memory_bytes=peak_memory_bytes(self.world.device),
            )
        _check_finite(data.step, "loss", metrics.loss)
        return metrics

    def _gradient_norm(self) -> float:
        """Norm over all stages; a weight that the ends of the pipeline share counts once."""
        twice = self.model.is_tied and self.world.stage == self.world.pp_size - 1 > 0
        norm = gradient_norm(self.model, without=self.model.end_weight() if twice else None)
        if self.world.pp_size == 1:
            return norm
        return float(self.world.all_gather_numbers([norm])[:: self.world.hdp_size].norm())

    def _finish(self, num_skipped_steps: int) -> None:
        """Trace, model and summary."""
        with collective(self.world.rank, "collecting the trace"):
            traces = self.world.gather_objects(group_by_pipeline(to_wall_clock(self.traced), self.world))
        if self.config.run.save_model:
            with collective(self.world.rank, "saving the model"):
                save_model(self.model, self.prepared, self.run_dir / "model", self.config, self.world)
        if self.leads:
            with writing(self.run_dir):
                write_trace(shift_to_zero([span for spans in traces for span in spans]), self.run_dir / "trace.json")
                write_summary(self.totals.summary(num_skipped_steps), self.run_dir / "summary.json")


def _check_finite(step: int, what: str, value: float) -> None:
    """End the run before weights or metrics are spoilt; the value is the same on all ranks, so all of them end."""
    if not math.isfinite(value):
        raise RunError(
            f"step {step}: the {what} is {value}, training has diverged; lower train.lr or train.grad_clip, or raise "
            "train.warmup_steps"
        )
