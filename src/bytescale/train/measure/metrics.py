"""What a step reports: one line of `metrics.jsonl`, and what the closing table adds up.

Every rank contributes a row of numbers; rank 0 combines them. Names are fixed by contract; units are in them. `tokens`
are targets, `tokens_per_s` counts input tokens, `imbalance` is measured compute, waiting excluded, maximum over mean.
Offloaded bytes are sums over the ranks, `offload_exposed_s` is that of the rank which waited longest.
`offload_asked_tokens` are the rows of pieces that the plan wants to leave: with no bytes out, nothing did. A number
that is not finite is written as null.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from bytescale.config.schema import TrainConfig
from bytescale.data import StepData
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.p2p import collective
from bytescale.runtime.world import World
from bytescale.train.measure.measurement import StepResult
from bytescale.train.run_dir import writing


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step before its update, and so decide alike.

    Attributes:
        step: number of the step.
        loss: mean over the targets of the global batch.
        grad_norm: global norm before clipping.
        signal_number: a signal that asked some rank to stop, or 0.
        num_skipped_in_a_row: steps up to this one whose update was left out; 0 where this one's was not.
    """

    step: int
    loss: float
    grad_norm: float
    signal_number: int
    num_skipped_in_a_row: int = 0

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def failure(self, config: TrainConfig) -> str | None:
        """Why the run cannot go on; None where it can."""
        skips = config.on_nonfinite == "skip"
        if self.is_finite or (skips and self.num_skipped_in_a_row <= config.max_skipped_steps):
            return None
        what, value = ("gradient norm", self.grad_norm) if math.isfinite(self.loss) else ("loss", self.loss)
        often = f" for {self.num_skipped_in_a_row} steps (train.max_skipped_steps = {config.max_skipped_steps})" * skips
        return (
            f"step {self.step}: the {what} is {value}{often}, training has diverged; lower train.lr or "
            "train.grad_clip, or raise train.warmup_steps"
        )

    def ends_run(self, config: TrainConfig) -> bool:
        """Whether no step may follow this one."""
        return self.signal_number != 0 or self.failure(config) is not None


def agree(
    world: World, data: StepData, result: StepResult, grad_norm: float, signal_number: int, num_skipped_before: int = 0
) -> Agreed:
    """Loss and requests to stop, the same on every rank, beside the gradient norm; a collective.

    Args:
        world: the ranks.
        data: the step.
        result: of this rank.
        grad_norm: global norm of the gradients, which every rank has.
        signal_number: what asked this rank to stop, 0 for nothing.
        num_skipped_before: steps in a row before this one whose update was left out.
    """
    with collective(world.rank, f"step {data.step}: the loss"):
        loss_sum, signals = world.all_gather_numbers([result.loss_sum, float(signal_number)]).T
    agreed = Agreed(
        step=data.step,
        loss=float(loss_sum.sum()) / data.batch.total_targets,
        grad_norm=grad_norm,
        signal_number=int(signals.max()),
    )
    return agreed if agreed.is_finite else replace(agreed, num_skipped_in_a_row=num_skipped_before + 1)


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`.

    `pp_bubble` is the share of the ranks' compute phase spent waiting for other stages, `dp_bubble` the share between
    the end of a rank's compute phase and that of the last. `tensor_bytes` is what the collectives of tensor parallelism
    sent, all ranks.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    sequences: int
    step_time_s: float
    tokens_per_s: float
    num_micro_batches_min: int
    num_micro_batches_max: int
    imbalance: float
    cp_degree_max: int
    chunks_max: int
    comm_bytes: int
    peak_memory_bytes: int
    plan_time_s: float
    data_wait_s: float
    offload_asked_tokens: int
    offload_bytes_out: int
    offload_bytes_in: int
    offload_exposed_s: float
    offload_declined_bytes: int
    pp_bubble: float
    dp_bubble: float
    tensor_bytes: int = 0

    @property
    def nothing_moved(self) -> bool:
        """Whether the plan asked for offloading and everything stayed."""
        return self.offload_asked_tokens > 0 and self.offload_bytes_out == 0

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def to_json(self) -> dict[str, Any]:
        """The line as JSON has it, which knows no NaN and no infinity."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def gather_metrics(
    world: World,
    data: StepData,
    result: StepResult,
    agreed: Agreed,
    *,
    lr: float,
    step_time_s: float,
    peak_memory_bytes: int,
) -> StepMetrics:
    """Combine the numbers of all ranks; a collective. Every rank gets the same line."""
    own = [float(result.bytes_sent), float(peak_memory_bytes), data.data_wait_s]
    own += [result.compute_s, result.busy_s, result.pipeline_wait_s, float(result.tensor_bytes_sent)]
    offload = result.offload
    own += [float(offload.bytes_out), float(offload.bytes_in), offload.exposed_s, float(offload.declined_bytes)]
    everyone = world.all_gather_numbers(own).T
    bytes_sent, peak, data_wait_s, compute_s, busy_s, pipeline_wait_s, tensor_bytes = everyone[:7]
    bytes_out, bytes_in, exposed_s, declined = everyone[7:]
    counts = data.plan.num_micro_batches()
    return StepMetrics(
        step=data.step,
        loss=agreed.loss,
        grad_norm=agreed.grad_norm,
        lr=lr,
        tokens=data.batch.total_targets,
        sequences=len(data.batch),
        step_time_s=step_time_s,
        tokens_per_s=data.batch.num_tokens / step_time_s,
        num_micro_batches_min=int(counts.min()),
        num_micro_batches_max=int(counts.max()),
        imbalance=float(busy_s.max() / busy_s.mean()),
        cp_degree_max=int(data.plan.sequence_degrees().max()),
        chunks_max=int(data.plan.sequence_chunks().max()),
        comm_bytes=int(bytes_sent.sum()),
        peak_memory_bytes=int(peak.max()),
        plan_time_s=data.plan_time_s,
        data_wait_s=float(data_wait_s.max()),
        offload_asked_tokens=asked_tokens(data.plan),
        offload_bytes_out=int(bytes_out.sum()),
        offload_bytes_in=int(bytes_in.sum()),
        offload_exposed_s=float(exposed_s.max()),
        offload_declined_bytes=int(declined.sum()),
        pp_bubble=float(pipeline_wait_s.mean() / compute_s.max()),
        dp_bubble=float(1 - compute_s.mean() / compute_s.max()),
        tensor_bytes=int(tensor_bytes.sum()),
    )


def asked_tokens(plan: StepPlan) -> int:
    """Tokens of pieces whose activations `plan` wants to leave, ceil(r * n) of each; stages are not counted apart."""
    return int(np.ceil(plan.pieces.offload_ratio * plan.pieces.tokens - 1e-9).sum())


class MetricsFile:
    """`metrics.jsonl`, written line by line so that a killed run keeps what it reached. Every line is whole."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Open it for the steps after `last_step`; lines of later ones, and half a line at the end, go."""
        self._path = path
        with writing(path):
            self._file = path.open("ab+", buffering=0)
            self._file.truncate(_end_of_step(path.read_bytes(), last_step))
            self._file.seek(0, os.SEEK_END)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            RunError: there is no room; what was there before stays as it was.
        """
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        begin = self._file.tell()
        with writing(self._path):
            try:
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._file.truncate(begin)
                raise

    def sync(self) -> None:
        """Bring what was written to the disk.

        Raises:
            OSError: that failed.
        """
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def last_restarts(path: Path) -> int:
    """How often the run had begun again when it wrote the last whole line of `metrics.jsonl`."""
    counts = [0]
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError, LookupError, TypeError):
            counts.append(int(json.loads(line)["restarts"]))
    return counts[-1]


def _end_of_step(text: bytes, last_step: int) -> int:
    """Where the lines of steps up to `last_step` end in `metrics.jsonl`."""
    end = 0
    for line in text.splitlines(keepends=True):
        try:
            is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= last_step
        except (ValueError, LookupError, TypeError):
            break
        if not is_kept:
            break
        end += len(line)
    return end
