"""Adds up the steps of a run to its closing summary, on rank 0; the sums go on where a run is resumed."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.data import SequenceDataset, StepData
from bytescale.report import RunIdentity, RunSummary
from bytescale.train.evaluation.evaluate import Evaluation
from bytescale.train.measure.metrics import StepMetrics


@dataclass
class _Sums:
    """Over the steps so far; plain values, as a checkpoint stores them. Names are those of `RunSummary`."""

    steps: int = 0
    tokens: int = 0
    targets: int = 0
    sequences: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    num_micro_batches_min: int = 0
    num_micro_batches_max: int = 0
    comm_bytes: int = 0
    comm_bytes_static: int | None = 0
    num_skipped_steps: int = 0
    num_nonfinite_steps: int = 0
    offload_bytes_out: int = 0
    offload_bytes_in: int = 0
    offload_exposed_s: float = 0.0
    offload_declined_bytes: int = 0
    num_unmoved_steps: int = 0
    num_evaluations: int = 0
    eval_loss_first: float | None = None
    eval_loss_last: float | None = None
    eval_loss_best: float | None = None
    num_failed_checkpoints: int = 0


@dataclass
class _Means:
    """Sums that the summary divides, or shows in another form."""

    step_time_s: float = 0.0
    pp_bubble: float = 0.0
    dp_bubble: float = 0.0
    wall_time_s: float = 0.0
    num_chunked_steps: int = 0
    sequences_by_degree: dict[str, int] = field(default_factory=dict)
    given: dict[str, list[int]] = field(default_factory=dict)


class RunTotals:
    """Sums over the steps so far."""

    def __init__(
        self,
        identity: RunIdentity,
        dataset: SequenceDataset,
        stored: Mapping[str, Any] | None = None,
        restarts: int = 0,
    ) -> None:
        """Begin.

        Args:
            identity: of the run.
            dataset: its data.
            stored: what `to_dict` gave in the run that this one goes on with; None begins with nothing.
            restarts: how often the run has begun again.
        """
        self._identity, self._dataset, self._counts, self.restarts = identity, dataset, dataset.counts, restarts
        self.notes: list[str] = []
        self._begin_s = time.perf_counter()
        self._sums = _Sums() if stored is None else _Sums(**stored["sums"])
        self._means = _Means() if stored is None else _Means(**stored["means"])
        self._degrees = Counter({int(degree): n for degree, n in self._means.sequences_by_degree.items()})
        self._given = {source.name: (0, 0) for source in dataset.sources}
        self._given |= {name: (sequences, tokens) for name, (sequences, tokens) in self._means.given.items()}

    @property
    def num_steps(self) -> int:
        return self._sums.steps

    @property
    def num_chunked_steps(self) -> int:
        """Steps in which a sequence ran in chunks."""
        return self._means.num_chunked_steps

    @property
    def num_failed_checkpoints(self) -> int:
        return self._sums.num_failed_checkpoints

    def add(self, data: StepData, metrics: StepMetrics, evaluation: Evaluation | None) -> None:
        """Count one step."""
        sums, means = self._sums, self._means
        fewest, most = metrics.num_micro_batches_min, metrics.num_micro_batches_max
        sums.num_micro_batches_min = min(sums.num_micro_batches_min, fewest) if sums.steps else fewest
        sums.num_micro_batches_max = max(sums.num_micro_batches_max, most)
        sums.steps += 1
        sums.tokens += data.batch.num_tokens
        sums.targets += metrics.tokens
        sums.sequences += metrics.sequences
        if metrics.is_finite:
            sums.loss_first = metrics.loss if sums.loss_first is None else sums.loss_first
            sums.loss_last = metrics.loss
        else:
            sums.num_nonfinite_steps += 1
        sums.num_skipped_steps += data.num_skipped
        sums.comm_bytes += metrics.comm_bytes
        known = sums.comm_bytes_static is not None and data.static_bytes is not None
        sums.comm_bytes_static = (sums.comm_bytes_static or 0) + (data.static_bytes or 0) if known else None
        for name in ("offload_bytes_out", "offload_bytes_in", "offload_exposed_s", "offload_declined_bytes"):
            setattr(sums, name, getattr(sums, name) + getattr(metrics, name))
        sums.num_unmoved_steps += metrics.nothing_moved
        means.step_time_s += metrics.step_time_s
        means.pp_bubble += metrics.pp_bubble
        means.dp_bubble += metrics.dp_bubble
        means.num_chunked_steps += metrics.chunks_max > 1
        self._degrees.update(_histogram(data.plan.sequence_degrees()))
        for name, (sequences, tokens) in self._dataset.given(data.batch.sequence_ids).items():
            self._given[name] = (self._given[name][0] + sequences, self._given[name][1] + tokens)
        if evaluation is not None:
            self._add_evaluation(evaluation.loss)

    def _add_evaluation(self, loss: float) -> None:
        sums = self._sums
        sums.num_evaluations += 1
        if math.isfinite(loss):
            sums.eval_loss_first = loss if sums.eval_loss_first is None else sums.eval_loss_first
            sums.eval_loss_last = loss
            sums.eval_loss_best = loss if sums.eval_loss_best is None else min(sums.eval_loss_best, loss)

    def add_failed_checkpoint(self) -> None:
        """Count a checkpoint that could not be written."""
        self._sums.num_failed_checkpoints += 1

    def to_dict(self) -> dict[str, Any]:
        """The sums as plain values, for a checkpoint."""
        means = asdict(self._means) | {"wall_time_s": self._wall_time_s()}
        means |= {"sequences_by_degree": dict(self._degrees), "given": dict(self._given)}
        return {"sums": asdict(self._sums), "means": means}

    def _wall_time_s(self) -> float:
        return self._means.wall_time_s + time.perf_counter() - self._begin_s

    def summary(self, status: str) -> RunSummary:
        """The run so far; `status` is finished, stopped or failed."""
        means, steps = self._means, max(1, self._sums.steps)
        return RunSummary(
            status=status,
            tokens_per_s=self._sums.tokens / means.step_time_s if means.step_time_s else 0.0,
            sequences_by_degree=tuple(sorted(self._degrees.items())),
            wall_time_s=self._wall_time_s(),
            num_split_documents=self._counts.overlong_split,
            num_dropped_sequences=self._counts.overlong_dropped,
            num_empty_sequences=self._counts.empty_dropped,
            pp_bubble=means.pp_bubble / steps,
            dp_bubble=means.dp_bubble / steps,
            restarts=self.restarts,
            sources=tuple((name, *given) for name, given in self._given.items()) if len(self._given) > 1 else (),
            notes=tuple(self.notes),
            **asdict(self._sums),
            **asdict(self._identity),
        )


def _histogram(degrees: npt.NDArray[np.int64]) -> dict[int, int]:
    values, counts = np.unique(degrees, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
