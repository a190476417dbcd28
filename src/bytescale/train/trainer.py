"""`check` and `run`: a training run from configuration to report.

Data flows one way: lengths -> plan -> pieces -> micro-batches -> gradients -> weights; `Trainer.train` is that line,
step by step. The loader's thread prepares step n + 1 while step n computes. Rank 0 writes the run directory; files are
whole or absent, and the model is saved before anything else that closes a run.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from bytescale.arrays import IntArray
from bytescale.config.schema import Config
from bytescale.data import StepData, StepLoader
from bytescale.errors import RunError
from bytescale.report.output import say
from bytescale.runtime.attention.interface import AttentionKernel
from bytescale.runtime.attention.kernels import select_kernel
from bytescale.runtime.device import TORCH_DTYPES, Machine, choose_device
from bytescale.runtime.fsdp import clip_gradients, gradient_norm, shard_model
from bytescale.runtime.model.decoder import LossModel, build_decoder, import_architecture, recompute_layers
from bytescale.runtime.model.hf_config import load_model_config
from bytescale.runtime.model.probe import probe
from bytescale.runtime.model.stages import stage_model
from bytescale.runtime.offload.offloader import Offloader
from bytescale.runtime.p2p import collective, first_line
from bytescale.runtime.presence import Lost, presence
from bytescale.runtime.tensor_parallel.probe import probe_split
from bytescale.runtime.world import World, open_world, process_identity
from bytescale.trace import Span
from bytescale.train.agreement import check_same_run, run_facts, weights_digest
from bytescale.train.evaluation.evaluate import Evaluation, evaluate
from bytescale.train.measure.measurement import StepResult
from bytescale.train.measure.metrics import Agreed, StepMetrics, agree, gather_metrics
from bytescale.train.measure.peak_memory import peak_memory_bytes, reset_peak_memory
from bytescale.train.measure.timeline import gather_traces
from bytescale.train.offload import open_offloader
from bytescale.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from bytescale.train.prepare import Prepared, prepare, static_bytes
from bytescale.train.reporter import FAILED, FINISHED, STOPPED, Reporter, open_reporter
from bytescale.train.resuming.checkpoints import Checkpoints
from bytescale.train.resuming.resume import check_resume, resume
from bytescale.train.resuming.start import Start
from bytescale.train.saving.checkpoint import check_shared, save_model
from bytescale.train.step import run_step
from bytescale.train.stopping import StopRequest, stop_request

NUM_TRACED_STEPS = 3
"""The last steps of a run whose timeline is kept."""

UNTIED = "config.json says tied embeddings, but the weights hold another head: it is not tied and trained by itself"


def check(config: Config, world_size: int) -> None:
    """Every check that needs no ranks.

    Raises:
        UserError: the run cannot work; one line.
    """
    check_resume(prepare(config, world_size), world_size)


def dry_run(config: Config, world_size: int) -> tuple[str, ...]:
    """The lines that a run of `config` would open with, after every check that needs no ranks.

    Raises:
        UserError: the run cannot work; one line.
    """
    prepared = prepare(config, world_size)
    return (*prepared.lines, *check_resume(prepared, world_size))


def preload(config: Config) -> None:
    """Import what ranks of this run need, without computing, so that ranks forked from this process share it.

    Raises:
        UserError: the model's configuration cannot work.
    """
    import_architecture(load_model_config(config.model, config.data.max_context))


def run(config: Config, lost: Lost | None = None) -> int | None:
    """Train as this rank of the run that torchrun describes, or as the only one.

    Args:
        config: the run.
        lost: ends this rank when another one is lost and the main thread does not come upon it.

    Returns:
        None, or the signal that ended the run early; what was reached is saved. None too where a scheduler's signal
        ended it and a checkpoint holds all that a next run needs.

    Raises:
        UserError: bad configuration or data.
        CommunicationError: another rank is gone or late.
        RunError: training diverged, the disk is full, or memory is.
    """
    if config.train.compute_threads is not None:
        torch.set_num_threads(config.train.compute_threads)
    device = choose_device(config.train.device, Machine.here())
    timeout_s, parallel = config.run.comm_timeout_s, config.parallel
    with presence(timeout_s, lost) as here, _memory_in_words(here.rank):
        here.doing("prepares data")
        prepared = prepare(config, here.size)
        config = prepared.config
        here.doing("loads the model")
        asked_tied = getattr(prepared.model_config, "tie_word_embeddings", False)
        model = build_model(config, prepared, here.rank * parallel.pp_size // here.size)
        if asked_tied and not model.is_tied:
            prepared = replace(prepared, notes=(*prepared.notes, UNTIED))
        held_out = None if prepared.held_out is None else prepared.held_out.dataset
        facts, weights = run_facts(config, prepared.dataset, held_out), weights_digest(model)
        with open_world(here, timeout_s, parallel, device, _say_waiting) as world:
            with collective(world.rank, "comparing the ranks"):
                check_same_run(world, facts, weights)
            shard_model(model, world, TORCH_DTYPES[config.train.dtype])
            kernel = select_kernel(world.device)
            # Posting a transfer to a rank that is gone fails at once, wherever it is posted.
            with open_offloader(config, model, world) as offloader, collective(world.rank, "an exchange"):
                return Trainer(config, prepared, world, model, kernel, offloader, here.another_store()).train()


def _say_waiting(line: str) -> None:
    say(f"bytescale: {line}", sys.stderr)


@contextmanager
def _memory_in_words(rank: int) -> Iterator[None]:
    """Turn a lack of memory inside the block into one line with the ways out."""
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
    probe(decoder, config.data.max_context, prepared.stages)
    probe_split(decoder, config.data.max_context, config.parallel.tp_size)
    model = stage_model(decoder.train(), prepared.stages, stage)
    if config.train.activation_checkpointing == "full":
        recompute_layers(model.decoder)
    return model


class Trainer:
    """A run on one rank: model, optimizer and loader. What is shown and written is its reporter's, on rank 0."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        world: World,
        model: LossModel,
        kernel: AttentionKernel,
        offloader: Offloader | None,
        store: Store,
    ) -> None:
        self.store = store
        self.config, self.prepared, self.world = config, prepared, world
        self.model, self.kernel, self.offloader = model, kernel, offloader
        self.optimizer = make_optimizer(model, config.train)
        self.traced: deque[tuple[Span, ...]] = deque(maxlen=NUM_TRACED_STEPS)

    def train(self) -> int | None:
        """All steps, then the files that close a run.

        Returns:
            None, or the signal that ended the run before its last step.

        Raises:
            RunError: training diverged; what was reached before is saved.
        """
        with ExitStack() as stack:
            start = resume(self.config, self.prepared, self.world, self.model, self.optimizer)
            reporter = stack.enter_context(self._reporter(start))
            stop = stack.enter_context(stop_request())
            checkpoints = self._checkpoints(reporter)
            num_skipped = start.num_skipped_in_a_row
            agreed, loader = None, stack.enter_context(self._loader(start))
            for data in loader:  # prepare_step: lengths -> plan -> proof -> pieces, one step ahead
                begin_ns = time.perf_counter_ns()
                reset_peak_memory(self.world.device)
                result = run_step(self.model, self.kernel, self.world, data, self.offloader)  # -> gradients
                norm = self._gradient_norm(data.step)
                agreed = agree(self.world, data, result, norm, stop.signal_number, num_skipped)
                num_skipped = agreed.num_skipped_in_a_row
                update = self._update(data.step, agreed)  # -> weights
                metrics = self._metrics(data, result, agreed, begin_ns, update)
                evaluation = self._evaluate(agreed, stop)
                if reporter is not None:
                    reporter.step(data, metrics, evaluation)
                checkpoints.after(data, agreed)
                if agreed.ends_run(self.config.train):
                    break
            checkpoints.close()
            return self._finish(reporter, agreed, checkpoints)

    def _loader(self, start: Start) -> StepLoader:
        return StepLoader(
            self.prepared.dataset,
            self.config.batch,
            self.config.train.seed,
            self.prepared.planner,
            self.world.hdp_rank,
            state=start.loader,
            num_steps=max(0, self.config.train.steps - start.step),
            first_step=start.step + 1,
            static_bytes=self._static_bytes if self.world.rank == 0 else None,
        )

    def _checkpoints(self, reporter: Reporter | None) -> Checkpoints:
        return Checkpoints(self.config, self.prepared, self.world, self.store, self.model, self.optimizer, reporter)

    def _static_bytes(self, lengths: IntArray) -> int | None:
        checkpointing = self.config.train.activation_checkpointing == "full"
        return static_bytes(self.prepared, lengths, checkpointing=checkpointing)

    def _num_parameters(self) -> float:
        """Of this stage; a weight that the ends of the pipeline share counts once."""
        return float(sum(p.numel() for p in self.model.parameters() if p is not self.model.copied_weight()))

    @contextmanager
    def _reporter(self, start: Start) -> Iterator[Reporter | None]:
        """Rank 0's reporter, None elsewhere."""
        with collective(self.world.rank, "starting the run"):
            identities = self.world.gather_objects(process_identity(self.world.rank))
            num_parameters = int(
                self.world.all_gather_numbers([self._num_parameters()])[:: self.world.stage_size].sum()
            )
        if self.world.rank != 0:
            self._check_shared()
            yield None
            return
        with open_reporter(self.config, self.prepared, self.world, identities, num_parameters, start) as reporter:
            self._check_shared()
            try:
                yield reporter
            except BaseException:
                # Nothing can be collected from the other ranks any more, and the first error is the one to show.
                with suppress(RunError):
                    reporter.write_ending(FAILED, self.traced)
                raise

    def _check_shared(self) -> None:
        """Refuse before the first step, not after the last, when a stage could not save its part."""
        if self.config.run.save_model:
            with collective(self.world.rank, "looking for the run directory"):
                check_shared(Path(self.config.run.dir), self.world)

    def _gradient_norm(self, step: int) -> float:
        """Global norm; a weight that the ends of the pipeline share counts once."""
        with collective(self.world.rank, f"step {step}: gradient norm"):
            return gradient_norm(self.model, self.world, without=self.model.copied_weight())

    def _update(self, step: int, agreed: Agreed) -> Span:
        """Move the weights, unless loss or gradients are not finite; they then stay as before the step."""
        begin_ns = time.perf_counter_ns()
        if agreed.is_finite:
            set_learning_rate(self.optimizer, learning_rate(step, self.config.train))
            with collective(self.world.rank, f"step {step}: clipping"):
                clip_gradients(self.model, agreed.grad_norm, self.config.train.grad_clip)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Span("update", "update", begin_ns, time.perf_counter_ns() - begin_ns, self.world.rank)

    def _metrics(self, data: StepData, result: StepResult, agreed: Agreed, begin_ns: int, update: Span) -> StepMetrics:
        """The numbers of all ranks, combined."""
        whole = Span(f"step {data.step}", "step", begin_ns, update.end_ns - begin_ns, self.world.rank, track="step")
        self.traced.append((whole, *result.spans, update))
        with collective(self.world.rank, f"step {data.step}: metrics"):
            return gather_metrics(
                self.world,
                data,
                result,
                agreed,
                lr=learning_rate(data.step, self.config.train),
                step_time_s=data.data_wait_s + whole.duration_s,
                peak_memory_bytes=peak_memory_bytes(self.world.device),
            )

    def _evaluate(self, agreed: Agreed, stop: StopRequest) -> Evaluation | None:
        """The loss on held-out documents, after the steps that `[eval]` names and the last one."""
        held_out, every, step = self.prepared.held_out, self.config.eval.every, agreed.step
        due = step == self.config.train.steps or (every > 0 and step % every == 0)
        if held_out is None or not due or agreed.ends_run(self.config.train):
            return None
        is_unwanted = lambda: stop.signal_number != 0  # noqa: E731
        return evaluate(self.model, self.kernel, self.world, self.prepared, held_out, is_unwanted)

    def _finish(self, reporter: Reporter | None, agreed: Agreed | None, checkpoints: Checkpoints) -> int | None:
        """Model first, then trace and summary; `agreed` is that of the last step."""
        failure = agreed.failure(self.config.train) if agreed is not None else None
        stopped = agreed is not None and not failure and agreed.step < self.config.train.steps
        if self.config.run.save_model:
            with collective(self.world.rank, "saving the model"):
                save_model(self.model, self.prepared, Path(self.config.run.dir) / "model", self.config, self.world)
        with collective(self.world.rank, "collecting the trace"):
            traces = gather_traces(self.world, self.traced)
        if reporter is not None:
            reporter.write_ending(FAILED if failure else STOPPED if stopped else FINISHED, traces)
        if failure is not None:
            # The first rank that fails has the launcher end the others: not before rank 0 has written.
            with collective(self.world.rank, "writing what closes the run"):
                self.world.all_gather_numbers([0.0])
            raise RunError(failure)
        is_asked = agreed is not None and stopped and not checkpoints.answer(agreed)
        return agreed.signal_number if agreed is not None and is_asked else None
