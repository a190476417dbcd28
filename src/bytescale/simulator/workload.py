"""Global batches for comparisons: a stratified pool of a length distribution, cut into batches of so many tokens.

Drawing at random leaves the rare longest sequences to chance: GitHub has 0.16 sequences of 2M in 32M tokens, so ten
batches hold none or five. The pool holds every range of the distribution as often as expected, at its quantiles; only
the order is random. Then

    split:  a sequence longer than the context becomes pieces of the context and a rest (the paper does not say);
    cut:    the stream is cut every `batch_tokens`; the sequence across a cut goes on in the next batch.

Invariant: each batch holds exactly `batch_tokens`; equal arguments give equal batches. Cost: O(sequences), numpy.
"""

import numpy as np
import numpy.typing as npt

from bytescale.errors import UserError
from bytescale.lengths import LengthSource, draw

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def stratified_batches(
    source: LengthSource, *, num_batches: int, batch_tokens: int, context: int, seed: int
) -> list[IntArray]:
    """`num_batches` batches of exactly `batch_tokens` tokens, no sequence longer than `context`."""
    if num_batches < 1 or batch_tokens < 1 or context < 1:
        raise UserError("a pool needs at least one batch of one token and a context of one token")
    rng = np.random.default_rng(seed)
    total = num_batches * batch_tokens
    pool = _quantiles(source, total, rng) if source.lognormal is None else _random(source, total, rng)
    stream = split_overlong(rng.permutation(pool), context)
    return _cut(stream, num_batches, batch_tokens)


def split_overlong(lengths: IntArray, context: int) -> IntArray:
    """Every sequence above `context` as whole contexts and a rest, in its place."""
    whole, rest = lengths // context, lengths % context
    counts = whole + (rest > 0)
    pieces = np.full(int(counts.sum()), context, dtype=np.int64)
    last = np.cumsum(counts) - 1
    pieces[last[rest > 0]] = rest[rest > 0]
    return pieces


def _quantiles(source: LengthSource, total: int, rng: np.random.Generator) -> IntArray:
    """Lengths that sum to at least `total`, every range of the table as often as its weight says."""
    share = source.weight / source.weight.sum()
    mean = sum(s * _row_quantiles(source, i, 257).mean() for i, s in enumerate(share.tolist()) if s)
    num = int(np.ceil(total / mean * 1.002)) + 1
    exact = share * num
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: num - int(counts.sum())]] += 1
    parts = [_row_quantiles(source, i, n) for i, n in enumerate(counts.tolist()) if n]
    pool = np.concatenate(parts)
    while int(pool.sum()) < total:
        pool = np.concatenate([pool, draw(source, 64, rng)])
    return pool if source.max_length is None else np.minimum(pool, source.max_length)


def _random(source: LengthSource, total: int, rng: np.random.Generator) -> IntArray:
    parts: list[IntArray] = []
    while sum(int(part.sum()) for part in parts) < total:
        parts.append(draw(source, 4096, rng))
    return np.concatenate(parts)


def _row_quantiles(source: LengthSource, row: int, num: int) -> IntArray:
    """`num` evenly spread quantiles of range `row`, density s^-exponent."""
    low, high, power = float(source.low[row]), source.high[row] + 1.0, 1.0 - float(source.exponent[row])
    u: FloatArray = (np.arange(num) + 0.5) / num
    if abs(power) < 1e-12:
        values = low * (high / low) ** u
    else:
        values = (low**power + u * (high**power - low**power)) ** (1.0 / power)
    return np.asarray(np.clip(values.astype(np.int64), source.low[row], source.high[row]), np.int64)


def _cut(stream: IntArray, num_batches: int, batch_tokens: int) -> list[IntArray]:
    """Cut the stream at multiples of `batch_tokens`; a sequence across a cut is divided there."""
    ends = np.cumsum(stream)
    cuts = np.arange(num_batches + 1, dtype=np.int64) * batch_tokens
    marks = np.union1d(ends[ends < cuts[-1]], cuts)
    lengths = np.diff(marks)
    owner = marks[1:]
    return [lengths[(owner > cuts[i]) & (owner <= cuts[i + 1])] for i in range(num_batches)]
