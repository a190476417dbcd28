"""The steps of one rank, each prepared on a thread while the one before it runs.

`prepare_step` is the way from lengths to tokens: draw, plan, prove, read. `StepLoader` calls it one step ahead and no
more. Cost: the memory of that step.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bytescale.arrays import IntArray
from bytescale.config.schema import BatchConfig
from bytescale.data.batches import GlobalBatch, next_batch
from bytescale.data.dataset import SequenceDataset
from bytescale.data.micro_batch import TokenMicroBatch, read_micro_batches
from bytescale.data.mixture.order import SequenceOrder
from bytescale.data.mixture.state import LoaderState
from bytescale.plan.share import RankShare, rank_share
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate

Planner = Callable[[IntArray], StepPlan]
"""Makes the plan of a global batch from its lengths; must be deterministic, since every rank calls its own."""

CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StepData:
    """All that one rank needs for one step.

    Attributes:
        step: number of the step.
        batch: the global batch, the same on every rank.
        share: this rank's part of the plan, which is valid and the same on every rank.
        micro_batches: the tokens of `share.micro_batches`; empty on an idle rank.
        plan_time_s: time to make and prove the plan, on the loader's thread.
        data_wait_s: time that the consumer waited for this step.
        state_after: where to resume once this step is done.
        num_skipped: batches without a target that were passed over to find this one.
        static_bytes: what strategy `static` would send for this batch; None where that is unknown.
    """

    step: int
    batch: GlobalBatch
    share: RankShare
    micro_batches: tuple[TokenMicroBatch, ...]
    plan_time_s: float
    data_wait_s: float
    state_after: LoaderState
    num_skipped: int = 0
    static_bytes: int | None = None

    @property
    def plan(self) -> StepPlan:
        """The plan of the whole batch."""
        return self.share.plan


@dataclass(frozen=True, eq=False)
class StepSource:
    """What the steps of one rank are made from.

    Attributes:
        dataset: the sequences.
        batch_config: size of the global batch.
        seed: seed of the order of sequences.
        order: the order of (dataset, seed).
        planner: makes the plan of a batch from its lengths; called on the loader's thread.
        hdp_rank: whose pieces to read.
        static_bytes: bytes that `static` would send for a batch of these lengths; None leaves that out.
    """

    dataset: SequenceDataset
    batch_config: BatchConfig
    seed: int
    order: SequenceOrder
    planner: Planner
    hdp_rank: int
    static_bytes: Callable[[IntArray], int | None] | None = None


def prepare_step(source: StepSource, step: int, state: LoaderState, cancelled: threading.Event) -> StepData | None:
    """Draw and prepare: everything in a step that comes before the model; None at the end of the data.

    Args:
        source: where from.
        step: its number.
        state: where in the data it begins.
        cancelled: set when the step is no longer wanted.

    Raises:
        PlanError: the planner made a plan that cannot be run.
    """
    batch, state_after, num_skipped = _draw(source, state, cancelled)
    if len(batch) == 0:
        return None
    return dataclasses.replace(prepare_batch(source, step, batch, state_after), num_skipped=num_skipped)


def prepare_batch(source: StepSource, step: int, batch: GlobalBatch, state_after: LoaderState) -> StepData:
    """Lengths, plan, proof, pieces: one global batch made ready for one rank.

    Args:
        source: where from.
        step: its number.
        batch: the sequences.
        state_after: where in the data the next batch begins.

    Raises:
        PlanError: the planner made a plan that cannot be run.
    """
    begin_s = time.perf_counter()
    plan = source.planner(batch.lengths)
    validate(plan)
    plan_time_s = time.perf_counter() - begin_s
    if not np.array_equal(plan.lengths, batch.lengths) or source.hdp_rank >= plan.hdp_size:
        raise ValueError(f"the planner made a plan that is not for rank {source.hdp_rank} of this batch")
    share = rank_share(plan, source.hdp_rank)
    tokens = read_micro_batches(source.dataset, batch, plan, [micro_batch.rows for micro_batch in share])
    static_bytes = source.static_bytes(batch.lengths) if source.static_bytes is not None else None
    return StepData(step, batch, share, tokens, plan_time_s, 0.0, state_after, static_bytes=static_bytes)


def _draw(source: StepSource, state: LoaderState, cancelled: threading.Event) -> tuple[GlobalBatch, LoaderState, int]:
    """The next batch with a target, the state after it, and how many were passed over; empty at the end of the data."""
    num_skipped = 0
    while True:
        batch, state = next_batch(source.dataset, source.batch_config, source.seed, state, source.order)
        if batch.total_targets > 0 or len(batch) == 0 or cancelled.is_set():
            return batch, state, num_skipped
        num_skipped += 1


class StepLoader:
    """Iterator over the steps of one rank, prepared one step ahead on a thread; it ends with the data if that ends.

    Use it as a context manager, or call `close`. An exception of the thread, the planner's or the validator's, is
    raised where the step would have been yielded. A batch without any target is passed over and counted in
    `skipped_steps`; it takes no step number.

    Attributes:
        skipped_steps: batches passed over before the step yielded last.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        batch_config: BatchConfig,
        seed: int,
        planner: Planner,
        hdp_rank: int,
        state: LoaderState | None = None,
        num_steps: int | None = None,
        first_step: int = 1,
        static_bytes: Callable[[IntArray], int | None] | None = None,
    ) -> None:
        """Begin preparing the first step.

        Args:
            dataset: the sequences.
            batch_config: size of the global batch.
            seed: seed of the order of sequences.
            planner: makes the plan of a batch from its lengths; called on the loader's thread.
            hdp_rank: whose pieces to read.
            state: where to begin; None is the beginning.
            num_steps: steps to yield; None never ends.
            first_step: number of the first one.
            static_bytes: see `StepSource`; called on the loader's thread, off the step's path.
        """
        self.skipped_steps = 0
        order = SequenceOrder(dataset, seed)
        self._source = StepSource(dataset, batch_config, seed, order, planner, hdp_rank, static_bytes)
        self._next_step = first_step
        self._end_step = None if num_steps is None else first_step + num_steps
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pending: Future[StepData | None] | None = None
        self._start(state or LoaderState())

    def __iter__(self) -> "StepLoader":
        return self

    def __next__(self) -> StepData:
        if self._closed.is_set() or self._pending is None:
            raise StopIteration
        began = time.perf_counter()
        data = self._pending.result()
        wait_s = time.perf_counter() - began
        if data is None:
            self._pending = None
            raise StopIteration
        self.skipped_steps += data.num_skipped
        self._next_step += 1
        self._start(data.state_after)
        return dataclasses.replace(data, data_wait_s=wait_s)

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop. A step in preparation is thrown away; one that takes too long is left to end with the process."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _start(self, state: LoaderState) -> None:
        """Prepare the next step on a thread of its own."""
        if self._end_step is not None and self._next_step >= self._end_step:
            self._pending = None
            return
        step = self._next_step
        self._pending, self._thread = in_background(lambda: prepare_step(self._source, step, state, self._closed))


def prepared_batches(source: StepSource, batches: Sequence[GlobalBatch]) -> Iterator[StepData]:
    """Given batches, numbered from 1, each prepared on a thread while the one before it runs."""

    def begin(step: int) -> Future[StepData]:
        return in_background(lambda: prepare_batch(source, step, batches[step - 1], LoaderState()))[0]

    pending = begin(1)
    for step in range(1, len(batches) + 1):
        data = pending.result()
        if step < len(batches):
            pending = begin(step + 1)
        yield data


def in_background(function: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    """What `function` will return or raise, and the thread that runs it, whose only link to us is the future."""
    pending: Future[T] = Future()

    def run() -> None:
        try:
            pending.set_result(function())
        except BaseException as error:
            pending.set_exception(error)

    # A daemon: a planner that never returns must not keep a failed process alive.
    thread = threading.Thread(target=run, name="bytescale-loader", daemon=True)
    thread.start()
    return pending, thread
