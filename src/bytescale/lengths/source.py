"""Where sequence lengths come from: a file or a named distribution, and the batches drawn from it.

Batches depend on source, size and seed alone. Cost: O(drawn sequences), numpy.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bytescale.arrays import IntArray
from bytescale.errors import UserError, nearest
from bytescale.lengths.distributions import DISTRIBUTIONS, named_distribution
from bytescale.lengths.files import read_lengths
from bytescale.lengths.table import LARGEST_LENGTH, LengthSource


def length_source(text: str) -> LengthSource:
    """A source from what a person wrote: a file, a name, or `name:key=value,...`.

    The key of every distribution is `max`; lognormal has `mean`, `sigma` and `min` too.

    Raises:
        UserError: no such file or name, an unknown key, or a file that holds no lengths.
    """
    name, _, rest = text.partition(":")
    if name in DISTRIBUTIONS:
        return named_distribution(name, rest)
    path = Path(text)
    if path.exists():
        return read_lengths(path)
    if path.suffix or "/" in text:
        raise UserError(f"cannot read lengths {text}: no such file")
    raise UserError(f"unknown length source {text!r}; {nearest(name, DISTRIBUTIONS)}, or a file")


def draw(source: LengthSource, num_sequences: int, rng: np.random.Generator) -> IntArray:
    """Independent draws. Shape [num_sequences]."""
    if source.lognormal is not None:
        mean, sigma, shortest = source.lognormal
        values = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_sequences)
        clipped: IntArray = np.clip(values.astype(np.int64), shortest, source.max_length or LARGEST_LENGTH)
        return clipped
    cumulative = np.cumsum(source.weight)
    row = np.searchsorted(cumulative, rng.random(num_sequences) * cumulative[-1], side="right")
    row = np.minimum(row, len(cumulative) - 1)
    low, high, a = source.low[row].astype(np.float64), source.high[row] + 1.0, source.exponent[row]
    u = rng.random(num_sequences)
    power = 1.0 - a
    flat = np.abs(power) < 1e-12
    safe = np.where(flat, 1.0, power)
    within = np.where(flat, low * (high / low) ** u, (low**safe + u * (high**safe - low**safe)) ** (1.0 / safe))
    lengths: IntArray = np.clip(within.astype(np.int64), source.low[row], source.high[row])
    return lengths if source.max_length is None else np.minimum(lengths, source.max_length)


def draw_batch(
    source: LengthSource, rng: np.random.Generator, *, tokens: int | None = None, sequences: int | None = None
) -> IntArray:
    """One global batch of a number of sequences, or of exactly a number of tokens (the last sequence is shortened)."""
    if sequences is not None:
        return draw(source, sequences, rng)
    assert tokens is not None
    parts: list[IntArray] = []
    total = 0
    while total < tokens:
        part = draw(source, 4096, rng)
        parts.append(part)
        total += int(part.sum())
    lengths = np.concatenate(parts)
    end = np.cumsum(lengths)
    num = int(np.searchsorted(end, tokens)) + 1
    lengths = lengths[:num].copy()
    lengths[-1] -= int(end[num - 1]) - tokens
    return lengths


def batches(
    source: LengthSource, num: int, seed: int, *, tokens: int | None = None, sequences: int | None = None
) -> Iterator[IntArray]:
    """`num` global batches. A listed file without a size is one batch as it stands, and `num` must be 1."""
    if tokens is None and sequences is None:
        if source.listed is None:
            raise UserError(f"{source.name} is a distribution: give --batch-tokens or --batch-sequences")
        if num != 1:
            raise UserError(
                f"{source.name} without a batch size is one batch; give --batch-tokens or --batch-sequences"
            )
        listed = source.listed
        yield listed if source.max_length is None else np.minimum(listed, source.max_length)
        return
    for name, size in (("tokens", tokens), ("sequences", sequences)):
        if size is not None and size < 1:
            raise UserError(f"a batch of {size} {name} is empty; it needs at least 1")
    if seed < 0:
        raise UserError(f"seed is {seed}; it must be at least 0")
    rng = np.random.default_rng(seed)
    for _ in range(num):
        yield draw_batch(source, rng, tokens=tokens, sequences=sequences)
