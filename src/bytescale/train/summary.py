"""Adds up the steps of a run to its closing summary, on rank 0."""

import math
import time
from collections import Counter
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from bytescale.data import SequenceDataset, StepData
from bytescale.report import RunIdentity, RunSummary
from bytescale.train.evaluation.evaluate import Evaluation
from bytescale.train.measure.metrics import StepMetrics


class RunTotals:
    """Sums over the steps so far."""

    def __init__(self, identity: RunIdentity, dataset: SequenceDataset) -> None:
        self._identity, self._dataset, self._counts = identity, dataset, dataset.counts
        self.notes: list[str] = []
        self._begin_s = time.perf_counter()
        self._metrics: list[StepMetrics] = []
        self._eval_losses: list[float] = []
        self._degrees: Counter[int] = Counter()
        self._given = {source.name: (0, 0) for source in dataset.sources}
        self._num_tokens = 0
        self._num_skipped = 0
        self._static_bytes: int | None = 0

    @property
    def num_steps(self) -> int:
        return len(self._metrics)

    @property
    def num_chunked_steps(self) -> int:
        """Steps in which a sequence ran in chunks."""
        return sum(m.chunks_max > 1 for m in self._metrics)

    def add(self, data: StepData, metrics: StepMetrics, evaluation: Evaluation | None) -> None:
        """Count one step."""
        self._metrics.append(metrics)
        if evaluation is not None:
            self._eval_losses.append(evaluation.loss)
        for name, (sequences, tokens) in self._dataset.given(data.batch.sequence_ids).items():
            self._given[name] = (self._given[name][0] + sequences, self._given[name][1] + tokens)
        self._degrees.update(_histogram(data.plan.sequence_degrees()))
        self._num_tokens += data.batch.num_tokens
        self._num_skipped += data.num_skipped
        if self._static_bytes is not None and data.static_bytes is not None:
            self._static_bytes += data.static_bytes
        else:
            self._static_bytes = None

    def summary(self, status: str) -> RunSummary:
        """The run so far; `status` is finished, stopped or failed."""
        metrics = self._metrics
        finite = [m for m in metrics if m.is_finite]
        eval_losses = [loss for loss in self._eval_losses if math.isfinite(loss)]
        step_time_s = sum(m.step_time_s for m in metrics)
        return RunSummary(
            steps=len(metrics),
            status=status,
            tokens=self._num_tokens,
            targets=sum(m.tokens for m in metrics),
            sequences=sum(m.sequences for m in metrics),
            loss_first=finite[0].loss if finite else None,
            loss_last=finite[-1].loss if finite else None,
            tokens_per_s=self._num_tokens / step_time_s if metrics else 0.0,
            num_micro_batches_min=min((m.num_micro_batches_min for m in metrics), default=0),
            num_micro_batches_max=max((m.num_micro_batches_max for m in metrics), default=0),
            sequences_by_degree=tuple(sorted(self._degrees.items())),
            comm_bytes=sum(m.comm_bytes for m in metrics),
            comm_bytes_static=self._static_bytes,
            wall_time_s=time.perf_counter() - self._begin_s,
            num_skipped_steps=self._num_skipped,
            num_nonfinite_steps=len(metrics) - len(finite),
            num_split_documents=self._counts.overlong_split,
            num_dropped_sequences=self._counts.overlong_dropped,
            num_empty_sequences=self._counts.empty_dropped,
            pp_bubble=_mean([m.pp_bubble for m in metrics]),
            dp_bubble=_mean([m.dp_bubble for m in metrics]),
            offload_bytes_out=sum(m.offload_bytes_out for m in metrics),
            offload_bytes_in=sum(m.offload_bytes_in for m in metrics),
            offload_exposed_s=sum(m.offload_exposed_s for m in metrics),
            offload_declined_bytes=sum(m.offload_declined_bytes for m in metrics),
            num_unmoved_steps=sum(m.nothing_moved for m in metrics),
            num_evaluations=len(self._eval_losses),
            eval_loss_first=eval_losses[0] if eval_losses else None,
            eval_loss_last=eval_losses[-1] if eval_losses else None,
            eval_loss_best=min(eval_losses, default=None),
            sources=tuple((name, *given) for name, given in self._given.items()) if len(self._given) > 1 else (),
            notes=tuple(self.notes),
            **asdict(self._identity),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _histogram(degrees: npt.NDArray[np.int64]) -> dict[int, int]:
    values, counts = np.unique(degrees, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
