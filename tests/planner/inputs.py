"""Inputs that several planner tests share."""

import numpy as np

from bytescale.arrays import IntArray


def lognormal(num: int, mean: float, seed: int = 0, sigma: float = 1.2, low: int = 16, high: int = 131072) -> IntArray:
    """Lengths of the published comparison of planners: log-normal with the given mean, clipped."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num).astype(np.int64), low, high)
