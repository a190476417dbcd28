"""Lengths to draw from, as a table of ranges with weights: what every source of lengths becomes.

A single length is a range of one. Inside a range lengths follow a power density s^-a. Files that list sequences one by
one keep the list itself in its own order.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale.arrays import FloatArray, IntArray

LARGEST_LENGTH = 2**48


@dataclass(frozen=True)
class LengthSource:
    """Lengths to draw from.

    Attributes:
        name: for tables and messages.
        low, high: inclusive ranges. Shape [num_ranges].
        weight: relative number of sequences in each range.
        exponent: a of the density s^-a inside each range.
        listed: the sequences of a file in its order, or None for a distribution.
        max_length: longer draws are cut to this.
        lognormal: (mean, sigma, min) in place of the table.
    """

    name: str
    low: IntArray
    high: IntArray
    weight: FloatArray
    exponent: FloatArray
    listed: IntArray | None = None
    max_length: int | None = None
    lognormal: tuple[float, float, int] | None = None


def length_table(
    name: str, low: npt.ArrayLike, high: npt.ArrayLike, weight: npt.ArrayLike, exponent: npt.ArrayLike = 1.0
) -> LengthSource:
    """The source of these inclusive ranges; columns of shape [num_ranges], `exponent` may be one for all."""
    lows = np.asarray(low, np.int64)
    exponents = np.broadcast_to(np.asarray(exponent, np.float64), lows.shape)
    return LengthSource(name, lows, np.asarray(high, np.int64), np.asarray(weight, np.float64), exponents)
