"""Which tokens of a sequence a piece holds: zig-zag placement for any length and any degree, without padding.

A sequence of s tokens on D ranks is cut at c(k) = floor(k*s / D). The piece with `cp_index` k holds a front run and a
back run of token indices,

    [floor(c(k)/2), floor(c(k+1)/2))    and    [s - ceil(c(k+1)/2), s - ceil(c(k)/2)),

together c(k+1) - c(k) tokens. Invariants: the runs of all k cover 0..s-1 exactly once, no piece exceeds ceil(s/D), and
the causal work (pairs with key <= query) of the pieces differs by less than one row of the mask per cut. Every rank
can compute every other rank's runs from (s, D, k), so nothing about shapes is ever exchanged. Cost: O(1) a piece; the
functions take scalars or numpy arrays alike.

Source: the symmetric chunk assignment of ByteScale section "distributed attention for packed sequences", freed of its
divisibility by 2D.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import IntArray


@dataclass(frozen=True)
class PieceRuns:
    """Half-open token runs of one piece: the front run lies before the back run, either may be empty."""

    front_begin: int
    front_end: int
    back_begin: int
    back_end: int

    @property
    def num_front_tokens(self) -> int:
        return self.front_end - self.front_begin

    @property
    def num_back_tokens(self) -> int:
        return self.back_end - self.back_begin

    @property
    def num_tokens(self) -> int:
        return self.num_front_tokens + self.num_back_tokens


def piece_tokens(length: Any, cp_degree: Any, cp_index: Any) -> Any:
    """Number of tokens of piece `cp_index`; works element-wise on integer arrays.

    Args:
        length: sequence length s >= 0.
        cp_degree: D >= 1.
        cp_index: k in 0..D-1.
    """
    return (cp_index + 1) * length // cp_degree - cp_index * length // cp_degree


def piece_runs(length: int, cp_degree: int, cp_index: int) -> PieceRuns:
    """The two token runs of piece `cp_index` of a sequence of `length` tokens on `cp_degree` ranks."""
    low = cp_index * length // cp_degree
    high = (cp_index + 1) * length // cp_degree
    return PieceRuns(
        front_begin=low // 2,
        front_end=high // 2,
        back_begin=length - (high + 1) // 2,
        back_end=length - (low + 1) // 2,
    )


def piece_positions(length: int, cp_degree: int, cp_index: int) -> IntArray:
    """Token indices inside the sequence (the position ids) of one piece, ascending. Shape [num_tokens]."""
    runs = piece_runs(length, cp_degree, cp_index)
    return np.concatenate(
        [
            np.arange(runs.front_begin, runs.front_end, dtype=np.int64),
            np.arange(runs.back_begin, runs.back_end, dtype=np.int64),
        ]
    )
