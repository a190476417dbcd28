"""Metadata first: the lengths of a global batch, its plan, then only the tokens of one rank.

Sequences come in the order of a permutation drawn anew for every epoch from (seed, epoch); a global batch is the next
run of that order and may cross into the next epoch. Invariants: batches depend on data, seed and `[batch]` alone, not
on ranks, plan or capacity; `LoaderState` is two integers and resumes exactly; labels are shifted inside the whole
sequence before it is cut into pieces, so the label of a token is the same on whatever rank it lands.

`StepLoader` prepares the next step on a thread while the current one runs. It keeps one step ahead and no more.

Cost: 8 bytes a sequence for the permutation; a batch costs its own size; reading a micro-batch is a fixed number of
numpy calls, whatever the number of pieces.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import IntArray
from bytescale.config.schema import BatchConfig
from bytescale.data.dataset import SequenceDataset
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.plan.zigzag import piece_runs

Planner = Callable[[IntArray], StepPlan]
"""Makes the plan of a global batch from its lengths; must be deterministic, since every rank calls its own."""

IGNORED_LABEL = -100
DRAW_WINDOW = 4096
"""Sequences looked at at once while a batch is filled."""
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class LoaderState:
    """Where the loader stands: the next sequence is number `position` of the order of `epoch`."""

    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        """The state as plain values, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LoaderState":
        """The state that `to_dict` wrote."""
        return cls(epoch=int(values["epoch"]), position=int(values["position"]))


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """Metadata of one global batch, in order of drawing; columns of shape [num_sequences].

    Attributes:
        sequence_ids: sequences of the dataset. A batch that crosses an epoch may hold one twice.
        lengths: tokens of each.
        num_targets: targets of each.
    """

    sequence_ids: IntArray
    lengths: IntArray
    num_targets: IntArray

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def total_targets(self) -> int:
        return int(self.num_targets.sum())


@dataclass(frozen=True, eq=False)
class TokenMicroBatch:
    """Tokens of one micro-batch of one rank; int64 arrays of shape [T], pieces in the order of the plan's rows.

    Attributes:
        input_ids: the tokens.
        labels: the next token of the same sequence, -100 at the sequence's last token.
        position_ids: index of each token inside its whole sequence.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray


@dataclass(frozen=True, eq=False)
class StepData:
    """All that one rank needs for one step.

    Attributes:
        step: number of the step.
        batch: the global batch, the same on every rank.
        plan: its plan, valid and the same on every rank.
        micro_batches: this rank's, in order of execution; empty on an idle rank.
        plan_time_s: time to make and prove the plan, on the loader's thread.
        data_wait_s: time that the consumer waited for this step.
        state_after: where to resume once this step is done.
    """

    step: int
    batch: GlobalBatch
    plan: StepPlan
    micro_batches: tuple[TokenMicroBatch, ...]
    plan_time_s: float
    data_wait_s: float
    state_after: LoaderState


class EpochOrder:
    """Order of the sequences in every epoch, a function of (seed, epoch); remembers the epoch asked for last."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self._num_sequences = num_sequences
        self._seed = seed
        self._epoch = -1
        self._permutation = np.zeros(0, dtype=np.int64)

    def of(self, epoch: int) -> IntArray:
        """Sequence ids in the order of `epoch`. Shape [num_sequences]."""
        if epoch != self._epoch:
            permutation = np.random.default_rng([self._seed, epoch]).permutation(self._num_sequences)
            self._permutation, self._epoch = permutation.astype(np.int64), epoch
        return self._permutation


def next_batch(
    dataset: SequenceDataset,
    batch_config: BatchConfig,
    seed: int,
    state: LoaderState,
    order: EpochOrder | None = None,
) -> tuple[GlobalBatch, LoaderState]:
    """The global batch at `state`, and the state behind it.

    By sequences: the next S. By tokens: the next ones while their sum is at most T, and at least one; the one that does
    not fit opens the next batch.

    Args:
        dataset: the sequences.
        batch_config: size of the batch.
        seed: seed of the run.
        state: where to begin.
        order: the orders of (dataset, seed), to keep from call to call; None draws them anew.

    Raises:
        UserError: the state lies outside the dataset, which is then not the one that the state was made with.
    """
    num_sequences = len(dataset)
    if state.epoch < 0 or not 0 <= state.position < num_sequences:
        raise UserError(
            f"the loader stands at sequence {state.position} of epoch {state.epoch}, the data has {num_sequences} "
            "sequences; resume with the data that the run began with"
        )
    order = order or EpochOrder(num_sequences, seed)
    epoch, position = state.epoch, state.position
    room = batch_config.sequences if batch_config.sequences is not None else batch_config.tokens
    assert room is not None
    taken: list[IntArray] = []
    while room > 0:
        window = order.of(epoch)[position : position + DRAW_WINDOW]
        used = np.cumsum(dataset.lengths[window] if batch_config.tokens is not None else np.ones_like(window))
        num_fit = int(np.searchsorted(used, room, side="right"))
        if num_fit == 0 and not taken:
            num_fit = 1
        taken.append(window[:num_fit])
        if num_fit > 0:
            room -= int(used[num_fit - 1])
        epoch, position = divmod(epoch * num_sequences + position + num_fit, num_sequences)
        if num_fit < len(window):
            break
    ids = np.concatenate(taken)
    batch = GlobalBatch(sequence_ids=ids, lengths=dataset.lengths[ids], num_targets=dataset.num_targets[ids])
    return batch, LoaderState(epoch=epoch, position=position)


def read_micro_batch(dataset: SequenceDataset, batch: GlobalBatch, plan: StepPlan, rows: IntArray) -> TokenMicroBatch:
    """Read the tokens of one micro-batch, and no others.

    Args:
        dataset: the sequences.
        batch: the global batch.
        plan: its plan, in zig-zag pieces of sequences or chunks.
        rows: rows of the micro-batch's pieces, as `plan.micro_batch_rows` gives them: ascending sequence.

    Raises:
        UserError: the plan is in the block layout.
    """
    degree, index = plan.pieces.cp_degree, plan.pieces.cp_index
    if degree is None or index is None:
        raise UserError(
            f'strategy {plan.strategy} places sequences in the "{plan.layout}" layout, which can be planned but not '
            "trained; choose a strategy of the zigzag layout"
        )
    sequence = plan.pieces.sequence[rows]
    lengths = batch.lengths[sequence]
    chunk_begin, chunk_end = plan.chunk_bounds(rows)
    # `piece_runs` works on columns as well: every field of `runs` has one entry a piece.
    runs_of: Callable[..., Any] = piece_runs
    runs = runs_of(chunk_end - chunk_begin, degree[rows], index[rows])
    begins = (np.stack([runs.front_begin, runs.back_begin], axis=1) + chunk_begin[:, None]).ravel()
    sizes = np.stack([runs.num_front_tokens, runs.num_back_tokens], axis=1).ravel()
    position_ids = _ranges(begins, sizes)
    piece_sizes = runs.num_tokens
    last = np.repeat(lengths - 1, piece_sizes)
    start = np.repeat(dataset.starts[batch.sequence_ids[sequence]], piece_sizes)
    labels = dataset.tokens[start + np.minimum(position_ids + 1, last)].astype(np.int64)
    labels[position_ids == last] = IGNORED_LABEL
    return TokenMicroBatch(
        input_ids=dataset.tokens[start + position_ids].astype(np.int64), labels=labels, position_ids=position_ids
    )


def _ranges(begins: IntArray, sizes: IntArray) -> IntArray:
    """begins[0], begins[0]+1, ... (sizes[0] of them), then those of begins[1], and so on."""
    shift = begins - (np.cumsum(sizes) - sizes)
    values: IntArray = np.arange(sizes.sum(), dtype=np.int64) + np.repeat(shift, sizes)
    return values


class StepLoader:
    """Iterator over the steps of one rank, prepared one step ahead on a thread.

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
    ) -> None:
        """Begin preparing the first step.

        Args:
            dataset: the sequences.
            batch_config: size of the global batch.
            seed: seed of the order of sequences.
            planner: makes the plan of a batch from its lengths; called on the loader's thread.
            hdp_rank: whose pieces to read.
            state: where to begin; None is the start of the first epoch.
            num_steps: steps to yield; None goes on for ever.
            first_step: number of the first one.
        """
        self.skipped_steps = 0
        self._dataset = dataset
        self._batch_config = batch_config
        self._seed = seed
        self._planner = planner
        self._hdp_rank = hdp_rank
        self._order = EpochOrder(len(dataset), seed)
        self._next_step = first_step
        self._end_step = None if num_steps is None else first_step + num_steps
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pending: Future[tuple[StepData, int]] | None = None
        self._start(state or LoaderState())

    def __iter__(self) -> "StepLoader":
        return self

    def __next__(self) -> StepData:
        if self._closed.is_set() or self._pending is None:
            raise StopIteration
        began = time.perf_counter()
        data, num_skipped = self._pending.result()
        wait_s = time.perf_counter() - began
        self.skipped_steps += num_skipped
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
        """Prepare the next step on a thread of its own, whose only link to us is the future that it fills."""
        if self._end_step is not None and self._next_step >= self._end_step:
            self._pending = None
            return
        pending: Future[tuple[StepData, int]] = Future()
        step = self._next_step

        def run() -> None:
            try:
                pending.set_result(self._prepare(step, state))
            except BaseException as error:
                pending.set_exception(error)

        self._pending = pending
        # A daemon: a planner that never returns must not keep a failed process alive.
        self._thread = threading.Thread(target=run, name="bytescale-loader", daemon=True)
        self._thread.start()

    def _prepare(self, step: int, state: LoaderState) -> tuple[StepData, int]:
        """Draw, plan, prove and read one step; returns it with the number of batches passed over."""
        num_skipped = 0
        while True:
            batch, state = next_batch(self._dataset, self._batch_config, self._seed, state, self._order)
            if batch.total_targets > 0 or self._closed.is_set():
                break
            num_skipped += 1
        began = time.perf_counter()
        plan = self._planner(batch.lengths)
        validate(plan)
        plan_time_s = time.perf_counter() - began
        if not np.array_equal(plan.lengths, batch.lengths) or self._hdp_rank >= plan.hdp_size:
            raise ValueError(f"the planner made a plan that is not for rank {self._hdp_rank} of this batch")
        micro_batches = tuple(
            read_micro_batch(self._dataset, batch, plan, rows) for rows in plan.micro_batch_rows(self._hdp_rank)
        )
        return StepData(step, batch, plan, micro_batches, plan_time_s, 0.0, state), num_skipped
