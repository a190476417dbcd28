"""Global batches by their metadata: which sequences, how long, before any token is read.

Sequences come in the order of a permutation that is drawn for every epoch from (seed, epoch); a global batch is the
next run of that order and may cross into the next epoch. Invariants: batches depend on data, seed and `[batch]` alone,
not on ranks, plan or capacity; `LoaderState` is two integers and resumes exactly.

Cost: 8 bytes a sequence for the permutation; a batch costs its own size.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import IntArray
from bytescale.config.schema import BatchConfig
from bytescale.data.dataset import SequenceDataset
from bytescale.errors import UserError

DRAW_WINDOW = 4096
"""Sequences looked at at once while a batch is filled."""


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
    """The global batch at `state`, and the state after it.

    By sequences: the next S. By tokens: the next ones while their sum is at most T, and at least one; the one that does
    not fit opens the next batch.

    Args:
        dataset: the sequences.
        batch_config: size of the batch.
        seed: seed of the run.
        state: where to begin.
        order: the orders of (dataset, seed), to keep from call to call; None draws them again.

    Raises:
        UserError: the state lies outside the dataset, so it belongs to another one.
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


def cut_batch(batch: GlobalBatch, batch_config: BatchConfig) -> list[GlobalBatch]:
    """The sequences of `batch` in its order, as batches of the size of `batch_config`; the last may be smaller."""
    room = batch_config.sequences if batch_config.sequences is not None else batch_config.tokens
    assert room is not None
    sizes = batch.lengths if batch_config.tokens is not None else np.ones_like(batch.lengths)
    used = np.concatenate([[0], np.cumsum(sizes)])
    parts, begin = [], 0
    while begin < len(batch):
        end = max(begin + 1, int(np.searchsorted(used, used[begin] + room, side="right")) - 1)
        columns = (batch.sequence_ids, batch.lengths, batch.num_targets)
        parts.append(GlobalBatch(*(column[begin:end] for column in columns)))
        begin = end
    return parts


def repetition_notes(dataset: SequenceDataset, batch_config: BatchConfig, num_steps: int) -> tuple[str, ...]:
    """Lines about data that a step, or the whole run, takes more than once; none where it takes it once at most."""
    if batch_config.tokens is not None:
        key, size, whole = "tokens", batch_config.tokens, int(dataset.lengths.sum())
    else:
        key, size, whole = "sequences", batch_config.sequences or 0, len(dataset)
    # A batch holds one sequence at least, however few tokens it may have.
    times_in_step = max(size / whole, 1 / len(dataset))
    notes = []
    if times_in_step > 1:
        notes.append(
            f"batch.{key} = {size:,} is more than the {whole:,} {key} of the data: each document appears about "
            f"{_times(times_in_step)} in a step"
        )
    epochs = times_in_step * num_steps
    if epochs > 1:
        notes.append(f"{num_steps:,} steps go through the data about {_times(epochs)} (epochs)")
    return tuple(notes)


def _times(number: float) -> str:
    return f"{number:,.0f} times" if number >= 10 else f"{number:.1f} times"
