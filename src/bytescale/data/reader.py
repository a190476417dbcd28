"""The tokens of sequences, by sequence and position: the only way from a plan to tokens.

`TokenReader` is all that training knows of where tokens lie. Labels are shifted inside the whole sequence, before it is
cut into pieces: that of position p is the token at p + 1, or -100 at the last position and where the source masks that
token. Cost: a fixed number of numpy calls a source and call, whatever the number of runs.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bytescale.arrays import IntArray, exclusive_sum
from bytescale.data.cache import TokenCorpus

IGNORED_LABEL = -100


class TokenReader(Protocol):
    """Reads tokens of sequences of one dataset."""

    def read_runs(self, sequences: IntArray, begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """Tokens begins[i]..ends[i]-1 of sequences[i] and their labels, run after run.

        Args:
            sequences: sequence of each run. Shape [num_runs], as the other two.
            begins: first position of each run in its sequence.
            ends: one after its last position, at most the length of the sequence.

        Returns:
            tokens: int64. Shape [sum(ends - begins)].
            labels: the same shape, -100 where a token has no target.
        """

    @property
    def num_ids(self) -> int:
        """1 + the largest id of any token."""

    def digest(self) -> str:
        """A fingerprint of the tokens, equal for equal data."""


class CorpusReader:
    """Reads from the token files of this machine."""

    def __init__(
        self, corpora: Sequence[TokenCorpus], starts: IntArray, lengths: IntArray, begins: Sequence[int]
    ) -> None:
        """Map sequences to tokens.

        Args:
            corpora: one a source.
            starts: where each sequence begins in the tokens of its corpus. Shape [num_sequences].
            lengths: tokens of each sequence. Shape [num_sequences].
            begins: first sequence of each corpus.
        """
        self._corpora, self.starts, self._lengths, self._begins = tuple(corpora), starts, lengths, begins

    def read_runs(self, sequences: IntArray, begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """See `TokenReader.read_runs`."""
        sizes = ends - begins
        if len(self._corpora) == 1:
            return self._read(self._corpora[0], sequences, begins, sizes)
        tokens, labels = np.zeros(sizes.sum(), dtype=np.int64), np.zeros(sizes.sum(), dtype=np.int64)
        places = exclusive_sum(sizes)
        corpus_of = np.searchsorted(self._begins, sequences, side="right") - 1
        for number in np.unique(corpus_of):
            runs = np.flatnonzero(corpus_of == number)
            part = self._read(self._corpora[number], sequences[runs], begins[runs], sizes[runs])
            target = ranges(places[runs], sizes[runs])
            tokens[target], labels[target] = part
        return tokens, labels

    def _read(
        self, corpus: TokenCorpus, sequences: IntArray, begins: IntArray, sizes: IntArray
    ) -> tuple[IntArray, IntArray]:
        positions = ranges(begins, sizes)
        start = np.repeat(self.starts[sequences], sizes)
        last = np.repeat(self._lengths[sequences] - 1, sizes)
        targets = start + np.minimum(positions + 1, last)
        labels = corpus.tokens[targets].astype(np.int64)
        labels[positions == last] = IGNORED_LABEL
        if corpus.mask is not None:
            labels[corpus.mask[targets] == 0] = IGNORED_LABEL
        return corpus.tokens[start + positions].astype(np.int64), labels

    @property
    def num_ids(self) -> int:
        """See `TokenReader.num_ids`."""
        return max(corpus.num_ids for corpus in self._corpora)

    def digest(self) -> str:
        """See `TokenReader.digest`; of tokens spread evenly over the data, and of all places."""
        hasher = hashlib.blake2b(self.starts.tobytes(), digest_size=8)
        for corpus in self._corpora:
            step = max(1, len(corpus.tokens) // (1 << 20))
            hasher.update(corpus.tokens[::step].astype(np.int64).tobytes())
            if corpus.mask is not None:
                hasher.update(corpus.mask[::step].tobytes())
        return hasher.hexdigest()


def ranges(begins: IntArray, sizes: IntArray) -> IntArray:
    """begins[0], begins[0]+1, ... (sizes[0] of them), then those of begins[1], and so on."""
    shift = begins - exclusive_sum(sizes)
    values: IntArray = np.arange(sizes.sum(), dtype=np.int64) + np.repeat(shift, sizes)
    return values
