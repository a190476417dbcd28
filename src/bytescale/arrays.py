"""Types of the columns that plans and cost models are made of, and the arithmetic they share."""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Whole = TypeVar("Whole", int, IntArray)


def ceil_div(dividend: Whole, divisor: int | IntArray) -> Whole:
    """`dividend / divisor` rounded up, exactly; entry by entry for columns."""
    quotient: Whole = -(-dividend // divisor)  # type: ignore[assignment]
    return quotient


def exclusive_sum(sizes: IntArray) -> IntArray:
    """Sum of all entries before each one: where each group begins when groups of these sizes follow each other."""
    before: IntArray = np.cumsum(sizes) - sizes
    return before


def first_not_whole(entries: Iterable[object]) -> int | None:
    """Position of the first entry that is not a whole number of 64 bits (truth values are not), or None."""
    for position, entry in enumerate(entries):
        number = isinstance(entry, int | float | np.integer | np.floating) and not isinstance(entry, bool)
        if not number or not -(2**63) <= entry < 2**63 or entry != int(entry):  # type: ignore[operator, call-overload]
            return position
    return None
