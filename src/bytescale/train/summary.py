"""Adds up the steps of a run to the summary that closes it. Lives on rank 0."""

import time
from collections import Counter

import numpy as np
import numpy.typing as npt

from bytescale.data import DatasetCounts, StepData
from bytescale.report import RunSummary
from bytescale.train.metrics import StepMetrics


class RunTotals:
    """Sums over the steps so far."""

    def __init__(self, world_size: int, pp_size: int, counts: DatasetCounts) -> None:
        self._world_size, self._pp_size, self._counts = world_size, pp_size, counts
        self._begin_s = time.perf_counter()
        self._metrics: list[StepMetrics] = []
        self._degrees: Counter[int] = Counter()
        self._num_tokens = 0
        self._static_bytes: int | None = 0

    def add(self, data: StepData, metrics: StepMetrics, static_bytes: int | None) -> None:
        """Count one step; `static_bytes` is what `static` would have sent, None where it cannot run."""
        self._metrics.append(metrics)
        self._degrees.update(_histogram(data.plan.sequence_degrees()))
        self._num_tokens += data.batch.num_tokens
        known = self._static_bytes is not None and static_bytes is not None
        self._static_bytes = self._static_bytes + static_bytes if known else None  # type: ignore[operator]

    def summary(self, num_skipped_steps: int) -> RunSummary:
        """The run so far."""
        metrics = self._metrics
        step_time_s = sum(m.step_time_s for m in metrics)
        return RunSummary(
            steps=len(metrics),
            tokens=self._num_tokens,
            sequences=sum(m.sequences for m in metrics),
            loss_first=metrics[0].loss if metrics else None,
            loss_last=metrics[-1].loss if metrics else None,
            tokens_per_s=self._num_tokens / step_time_s if metrics else 0.0,
            num_micro_batches_min=min((m.num_micro_batches_min for m in metrics), default=0),
            num_micro_batches_max=max((m.num_micro_batches_max for m in metrics), default=0),
            sequences_by_degree=tuple(sorted(self._degrees.items())),
            comm_bytes=sum(m.comm_bytes for m in metrics),
            comm_bytes_static=self._static_bytes,
            wall_time_s=time.perf_counter() - self._begin_s,
            world_size=self._world_size,
            num_skipped_steps=num_skipped_steps,
            num_split_documents=self._counts.overlong_split,
            num_dropped_sequences=self._counts.overlong_dropped,
            num_empty_sequences=self._counts.empty_dropped,
            pp_size=self._pp_size,
            pp_bubble=_mean([m.pp_bubble for m in metrics]),
            dp_bubble=_mean([m.dp_bubble for m in metrics]),
            offload_bytes_out=sum(m.offload_bytes_out for m in metrics),
            offload_bytes_in=sum(m.offload_bytes_in for m in metrics),
            offload_exposed_s=sum(m.offload_exposed_s for m in metrics),
            offload_declined_bytes=sum(m.offload_declined_bytes for m in metrics),
            num_unmoved_steps=sum(m.nothing_moved for m in metrics),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _histogram(degrees: npt.NDArray[np.int64]) -> dict[int, int]:
    values, counts = np.unique(degrees, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
