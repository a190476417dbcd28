"""Packing: short sequences into micro-batches of at most `capacity` tokens.

`next_fit` keeps arrival order (Megatron-LM, MegaScale); `best_fit` is line 8 of Algorithm 1: fill one pack after
another, each time with the longest sequence that still fits. Both are O(n) up to logarithms.
"""

from bisect import bisect_left

import numpy as np

from bytescale.arrays import IntArray


def next_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Pack number of each item, in arrival order; a pack closes when the next item does not fit. Shape of `sizes`."""
    end = np.cumsum(sizes)
    pack = np.zeros(len(sizes), dtype=np.int64)
    first, number = 0, 0
    while first < len(sizes):
        base = end[first] - sizes[first]
        last = max(first + 1, int(np.searchsorted(end, base + capacity, side="right")))
        pack[first:last] = number
        first, number = last, number + 1
    return pack


def best_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Pack number of each item; every pack takes, again and again, the longest item that fits. Shape of `sizes`.

    Items of one size are interchangeable, so the search runs over distinct sizes with a pointer that skips used ones.
    """
    order = np.argsort(-sizes, kind="stable")
    distinct, first, counts = np.unique(-sizes[order], return_index=True, return_counts=True)
    size = (-distinct).tolist()
    left: list[int] = counts.tolist()
    below = list(range(len(size) + 1))

    def usable(k: int) -> int:
        """Index of the first size class >= k (so of equal or smaller size) with items left."""
        root = k
        while below[root] != root:
            root = below[root]
        while below[k] != root:
            below[k], k = root, below[k]
        return root

    negative = distinct.tolist()
    pack = np.zeros(len(sizes), dtype=np.int64)
    number, num_left = 0, len(sizes)
    taken = [0] * len(size)
    while num_left:
        room, k = capacity, usable(0)
        while k < len(size):
            count = max(1, min(left[k], room // size[k])) if room == capacity else min(left[k], room // size[k])
            begin = int(first[k]) + taken[k]
            pack[order[begin : begin + count]] = number
            taken[k] += count
            left[k] -= count
            num_left -= count
            room -= count * size[k]
            if not left[k]:
                below[k] = k + 1
            k = usable(max(k, bisect_left(negative, -room)))
        number += 1
    return pack
