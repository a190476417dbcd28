"""Types of the columns that plans and cost models are made of, and what an entry of one may be."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def first_not_whole(entries: Iterable[object]) -> int | None:
    """Position of the first entry that is no whole number of 64 bits (a truth value is none); None without one."""
    for position, entry in enumerate(entries):
        number = isinstance(entry, int | float | np.integer | np.floating) and not isinstance(entry, bool)
        if not number or not -(2**63) <= entry < 2**63 or entry != int(entry):  # type: ignore[operator, call-overload]
            return position
    return None
