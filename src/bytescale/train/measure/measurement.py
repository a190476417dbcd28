"""What one rank measures in one step, without holding it up.

Times come from `StepClock`, waits from the groups that waited, copies from the offloader. Spans are bounded: one a
micro-batch and direction, one wait a kind and operation, the longest copies. `busy_s` is what `imbalance` compares: the
compute phase without waiting for other ranks.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bytescale.data import StepData
from bytescale.plan.order import FORWARD
from bytescale.plan.share import MicroBatchShare
from bytescale.runtime.clock import Marker, marker_for
from bytescale.runtime.offload.offloader import OffloadReport
from bytescale.runtime.tensor_parallel.group import REDUCING
from bytescale.runtime.world import World
from bytescale.trace import Span, span_between
from bytescale.train.measure.step_clock import StepClock, without_overlap

MAX_COPIES = 200
"""Copies of a step that its trace shows; the longest."""
MAX_SEQUENCE_IDS = 8
"""Sequences of a micro-batch that its spans name."""


@dataclass(frozen=True)
class StepResult:
    """What one rank did in one step.

    Attributes:
        loss_sum: loss summed over this rank's targets; 0 but on the first of the TP ranks, which all have the same.
        compute_s: the compute phase, everything included.
        busy_s: compute phase without waiting for other ranks.
        pipeline_wait_s: time in the compute phase that other stages were waited for.
        bytes_sent: by attention.
        tensor_bytes_sent: by collectives of tensor parallelism.
        offload: what was offloaded.
        spans: timeline, nanoseconds as `time.perf_counter_ns` counts them.
    """

    loss_sum: float
    compute_s: float
    busy_s: float
    pipeline_wait_s: float
    bytes_sent: int
    spans: tuple[Span, ...]
    offload: OffloadReport = field(default_factory=OffloadReport)
    tensor_bytes_sent: int = 0


class StepMeasurement:
    """Told of every phase of a step as it ends; read once, by `result`."""

    def __init__(self, world: World, data: StepData, marker: Marker | None = None) -> None:
        self._world, self._data = world, data
        for link in world.links:
            link.reset_counters()
        self._clock = StepClock(marker or marker_for(world.device), world.rank)
        self._args = [micro_batch_args(data, part) for part in data.share]

    def gathered(self) -> None:
        """Parameters are whole."""
        self._clock.lap("gather", "gather")

    def operation(self, number: int, direction: int) -> None:
        """One operation of the schedule is done."""
        category = "forward" if direction == FORWARD else "backward"
        self._clock.lap(f"{category} micro-batch {number}", category, self._args[number])

    def computed(self) -> None:
        """Own micro-batches are done and what they sent has arrived."""
        if self._world.tp is not None:
            self._world.tp.begin_reduction()
        self._clock.lap("drain", "wait")

    def reduced(self) -> None:
        """Gradients are summed over the ranks."""
        self._clock.lap("reduce", "reduce")

    def result(self, loss_sum: float, offloaded: OffloadReport) -> StepResult:
        """Everything measured; waits for the device, once."""
        spans = self._clock.read()
        gather, drain = spans[0], spans[-2]
        compute_s = (drain.start_ns - gather.end_ns) / 1e9
        waits = [(link, wait) for link in self._world.links for wait in link.waits()]
        pipeline_wait_s = sum(wait.duration_s for link, wait in waits if link in self._world.pipe)
        wait_spans = [
            self._beside(f"wait {w.what}", "wait", w.begin_s, w.duration_s, f"{w.what} wait") for _, w in waits
        ]
        return StepResult(
            loss_sum=loss_sum,
            compute_s=compute_s,
            busy_s=compute_s - sum(wait.duration_s for _, wait in waits if wait.what != REDUCING),
            pipeline_wait_s=pipeline_wait_s,
            bytes_sent=self._world.comm.bytes_sent,
            spans=(*spans, *_by_track([*wait_spans, *self._offload_spans(offloaded)])),
            offload=offloaded,
            tensor_bytes_sent=0 if self._world.tp is None else self._world.tp.bytes_sent,
        )

    def _offload_spans(self, report: OffloadReport) -> list[Span]:
        """One track a direction, and one for the time that compute waited."""
        copies = sorted(report.copies, key=lambda copy: -copy.duration_s)[:MAX_COPIES]
        waits = sorted(report.waits, key=lambda wait: -wait[1])[:MAX_COPIES]
        return [
            self._beside(
                f"copy {c.direction}", "offload", c.begin_s, c.duration_s, f"offload {c.direction}", c.num_bytes
            )
            for c in copies
        ] + [self._beside("wait copy", "wait", begin_s, wait_s, "offload wait") for begin_s, wait_s in waits]

    def _beside(
        self, name: str, category: str, begin_s: float, duration_s: float, track: str, num_bytes: int | None = None
    ) -> Span:
        args = {} if num_bytes is None else {"bytes": num_bytes}
        return span_between(name, category, begin_s, begin_s + duration_s, self._world.rank, track, args)


def micro_batch_args(data: StepData, part: MicroBatchShare) -> dict[str, Any]:
    """What a trace says of a micro-batch: which sequences of the data set, how many tokens, what degree."""
    ids = np.unique(data.batch.sequence_ids[part.sequences])
    return {
        "micro_batch": part.number,
        "sequences": len(ids),
        "sequence_ids": ids[:MAX_SEQUENCE_IDS].tolist(),
        "tokens": part.num_tokens,
        "cp_degree": part.cp_degree,
    }


def _by_track(spans: list[Span]) -> list[Span]:
    tracks = sorted({span.track for span in spans})
    return [span for track in tracks for span in without_overlap(s for s in spans if s.track == track)]
