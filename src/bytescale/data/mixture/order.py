"""The one order of all sequences of all sources.

Each source has an order of its own, a permutation drawn for every epoch from (seed, epoch, name). The sources are
merged by virtual time: a sequence of n tokens of a source with share w that gave `drawn` tokens before stands at

    t = (drawn + n / 2) / w

and the sequence with the least t comes next; by sequences n is 1. This is fair queueing with known lengths: at any
moment no source is further from its share than half of one of its sequences, whatever the lengths. Invariant: the order
depends on data, weights and seed alone, so a batch is the same however many sequences are looked at at once.

Cost: 8 bytes a sequence for the permutations; a sort of the sequences looked at.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bytescale.arrays import IntArray
from bytescale.data.dataset import SequenceDataset
from bytescale.data.mixture.state import SourceState


class SequenceOrder:
    """The sequences of a dataset in the order of a seed; remembers the permutation of each source used last."""

    def __init__(self, dataset: SequenceDataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self.mean_length = float(dataset.lengths.mean())
        self._epochs = [-1] * len(dataset.sources)
        self._permutations = [np.zeros(0, dtype=np.int64)] * len(dataset.sources)

    def upcoming(self, states: Sequence[SourceState], num_sequences: int) -> IntArray:
        """What comes next from `states`, of at most `num_sequences` of each source; empty at the end of the data."""
        windows = [self._of_source(number, state, num_sequences) for number, state in enumerate(states)]
        if len(windows) == 1:
            return windows[0]
        times = [self._times(window, state) for window, state in zip(windows, states, strict=True)]
        # Beyond the last time that is known of some source, more of it might come first.
        ends = [
            time[-1]
            for number, time in enumerate(times)
            if len(time) and not self._is_last(number, states[number], len(time))
        ]
        time, ids = np.concatenate(times), np.concatenate(windows)
        order = np.argsort(time, kind="stable")
        known = order[time[order] <= min(ends, default=np.inf)]
        return ids[known]

    def after(self, states: Sequence[SourceState], taken: IntArray) -> list[SourceState]:
        """The states once the sequences `taken`, which `upcoming` gave, are done."""
        source_of, amounts = self._dataset.source_of(taken), self._dataset.amounts(taken)
        num_taken = np.bincount(source_of, minlength=len(states)).tolist()
        result = []
        for number, (state, source) in enumerate(zip(states, self._dataset.sources, strict=True)):
            epoch, position = divmod(state.epoch * len(source) + state.position + num_taken[number], len(source))
            drawn = state.drawn + int(amounts[source_of == number].sum())
            result.append(replace(state, epoch=epoch, position=position, drawn=drawn))
        return result

    def _of_source(self, number: int, state: SourceState, num_sequences: int) -> IntArray:
        """The next `num_sequences` of one source, fewer where its epochs end."""
        source = self._dataset.sources[number]
        epoch, position, parts = state.epoch, state.position, [np.zeros(0, dtype=np.int64)]
        while num_sequences > 0 and (source.epochs is None or epoch < source.epochs):
            part = self._permutation(number, epoch)[position : position + num_sequences]
            parts.append(part)
            num_sequences -= len(part)
            epoch, position = epoch + 1, 0
        return np.concatenate(parts) + source.begin

    def _permutation(self, number: int, epoch: int) -> IntArray:
        if epoch != self._epochs[number]:
            source = self._dataset.sources[number]
            key = [self._seed, epoch, *([zlib.crc32(source.name.encode())] if source.name else [])]
            self._permutations[number] = np.random.default_rng(key).permutation(len(source)).astype(np.int64)
            self._epochs[number] = epoch
        return self._permutations[number]

    def _times(self, window: IntArray, state: SourceState) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        amounts = self._dataset.amounts(window)
        # Twice the middle of each sequence, in whole numbers: the same however the window is cut.
        middles = 2 * (state.drawn + np.cumsum(amounts)) - amounts
        times: np.ndarray[tuple[int], np.dtype[np.float64]] = middles / (2 * state.weight)
        return times

    def _is_last(self, number: int, state: SourceState, num_sequences: int) -> bool:
        """Whether nothing of a source follows its next `num_sequences`."""
        source = self._dataset.sources[number]
        done = state.epoch * len(source) + state.position + num_sequences
        return source.epochs is not None and done >= source.epochs * len(source)
