"""Global batches by their metadata: which sequences, how long, before any token is read.

Sequences come in the order of `bytescale.data.mixture.order`; a global batch is the next run of that order and may
cross into the next epoch of a source. Invariants: batches depend on data, seed and `[batch]` alone, not on ranks, plan
or capacity; `LoaderState` is a few integers a source and resumes exactly.

Cost: a batch costs its own size.
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import IntArray
from bytescale.config.schema import BatchConfig
from bytescale.data.dataset import SequenceDataset
from bytescale.data.mixture.order import SequenceOrder
from bytescale.data.mixture.state import LoaderState
from bytescale.errors import counted

DRAW_WINDOW = 4096
"""Sequences of a source looked at at once while a batch is filled."""


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


def next_batch(
    dataset: SequenceDataset,
    batch_config: BatchConfig,
    seed: int,
    state: LoaderState,
    order: SequenceOrder | None = None,
) -> tuple[GlobalBatch, LoaderState]:
    """The global batch at `state`, and the state after it; an empty batch at the end of the data.

    By sequences: the next S. By tokens: the next ones while their sum is at most T, and at least one; the one that does
    not fit opens the next batch. Only sources that all have a bound of epochs have an end; the last batch is then what
    is left.

    Args:
        dataset: the sequences.
        batch_config: size of the batch.
        seed: seed of the run.
        state: where to begin.
        order: the order of (dataset, seed), to keep from call to call; None draws it again.

    Raises:
        UserError: the state lies outside the dataset, so it belongs to another one.
    """
    state = state.of(dataset)
    order = order or SequenceOrder(dataset, seed)
    room = _room(batch_config)
    states, taken = list(state.sources), [np.zeros(0, dtype=np.int64)]
    while room > 0:
        likely = room if batch_config.tokens is None else 16 + int(1.5 * room / order.mean_length)
        window = order.upcoming(states, min(DRAW_WINDOW, likely))
        used = np.cumsum(_sizes(batch_config, dataset.lengths[window]))
        num_fit = int(np.searchsorted(used, room, side="right"))
        if num_fit == 0 and len(taken) == 1:
            num_fit = min(1, len(window))
        if num_fit == 0:
            break
        taken.append(window[:num_fit])
        room -= int(used[num_fit - 1])
        states = order.after(states, window[:num_fit])
        if num_fit < len(window):
            break
    ids = np.concatenate(taken)
    batch = GlobalBatch(sequence_ids=ids, lengths=dataset.lengths[ids], num_targets=dataset.num_targets[ids])
    return batch, LoaderState(tuple(states), state.mix)


def steps_until_end(dataset: SequenceDataset, batch_config: BatchConfig, seed: int, limit: int) -> int:
    """How many batches with a target the data has before every source has gone through its epochs; `limit` at most.

    Cost: nothing where some source has no bound, else the drawing of these batches.
    """
    if any(source.epochs is None for source in dataset.sources):
        return limit
    state, order, num_steps = LoaderState(), SequenceOrder(dataset, seed), 0
    while num_steps < limit:
        batch, state = next_batch(dataset, batch_config, seed, state, order)
        if len(batch) == 0:
            break
        num_steps += batch.total_targets > 0
    return num_steps


def cut_batch(batch: GlobalBatch, batch_config: BatchConfig) -> list[GlobalBatch]:
    """The sequences of `batch` in its order, as batches of the size of `batch_config`; the last may be smaller."""
    used = np.concatenate([[0], np.cumsum(_sizes(batch_config, batch.lengths))])
    parts, begin = [], 0
    while begin < len(batch):
        end = max(begin + 1, int(np.searchsorted(used, used[begin] + _room(batch_config), side="right")) - 1)
        columns = (batch.sequence_ids, batch.lengths, batch.num_targets)
        parts.append(GlobalBatch(*(column[begin:end] for column in columns)))
        begin = end
    return parts


def _room(batch_config: BatchConfig) -> int:
    room = batch_config.sequences if batch_config.sequences is not None else batch_config.tokens
    assert room is not None
    return room


def _sizes(batch_config: BatchConfig, lengths: IntArray) -> IntArray:
    """What each sequence takes of the room of a batch."""
    return lengths if batch_config.tokens is not None else np.ones_like(lengths)


def repetition_notes(dataset: SequenceDataset, batch_config: BatchConfig, num_steps: int) -> tuple[str, ...]:
    """Lines about data that a step, or the whole run, takes more than once; none where it takes it once at most."""
    key = "tokens" if batch_config.tokens is not None else "sequences"
    notes = []
    for source, share in zip(dataset.sources, _shares(dataset, key), strict=True):
        lengths = dataset.lengths[source.begin : source.end]
        whole = int(_sizes(batch_config, lengths).sum())
        # A batch holds one sequence at least, however few tokens it may have.
        times_in_step = share * max(_room(batch_config) / whole, 1 / len(source))
        where, data = (f"source {source.name}: ", "source") if source.name else ("", "data")
        if times_in_step > 1:
            notes.append(
                f"{where}batch.{key} = {_room(batch_config):,} is more than the {whole:,} {key} of the {data}: each "
                f"document appears about {_times(times_in_step)} in a step"
            )
        epochs = times_in_step * num_steps
        if source.epochs is not None and epochs > source.epochs:
            end = int(source.epochs / times_in_step)
            bound = f"data.sources.epochs = {source.epochs}"
            notes.append(f"{where}used up after about {counted(end, 'step', ',')}, see {bound}")
        elif epochs > 1:
            notes.append(f"{where}{num_steps:,} steps go through the data about {_times(epochs)} (epochs)")
    return tuple(notes)


def _shares(dataset: SequenceDataset, key: str) -> list[float]:
    """About what share each source has of a batch, in tokens or sequences as `key` says."""
    shares = []
    for source in dataset.sources:
        mean_length = float(dataset.lengths[source.begin : source.end].mean())
        per_unit = {"tokens": mean_length, "sequences": 1.0}
        shares.append(source.weight * per_unit[key] / per_unit[dataset.mix])
    return [share / sum(shares) for share in shares]


def _times(number: float) -> str:
    return f"{number:,.0f} times" if number >= 10 else f"{number:.1f} times"
