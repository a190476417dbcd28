"""Global batches for comparisons: a stratified pool of a length distribution, cut into batches of equal size.

Drawing at random leaves the rare longest sequences to chance: GitHub has 0.16 sequences of 2M in 32M tokens, so ten
batches hold none or five. The pool holds every range of the distribution as often as expected, at its quantiles; only
the order is random. Then

    split:  a sequence longer than the context becomes pieces of the context and a rest (the paper does not say);
    fill:   a batch takes the stream in order; a sequence that no longer fits waits for the next batch, those
            after it fill this one and a short one is divided. (Cutting would lose one 2M sequence in ten.)
            Of a few orders the one that leaves the shortest sequence over at the end is taken.

Invariant: each batch holds exactly `batch_tokens`; equal arguments give equal batches. Cost: O(sequences), numpy.
"""

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.errors import UserError
from bytescale.lengths.source import draw
from bytescale.lengths.table import LengthSource

_LOOK_AHEAD, _ORDERS = 2048, 4


def stratified_batches(
    source: LengthSource, *, num_batches: int, batch_tokens: int, context: int, seed: int
) -> list[IntArray]:
    """`num_batches` batches of exactly `batch_tokens` tokens, no sequence longer than `context`."""
    if num_batches < 1 or batch_tokens < 1 or context < 1:
        raise UserError("a pool needs at least one batch of one token and a context of one token")
    rng = np.random.default_rng(seed)
    total = num_batches * batch_tokens
    pool = _quantiles(source, total, rng) if source.lognormal is None else _random(source, total, rng)
    best, least = None, 0
    for _ in range(_ORDERS):
        stream = split_overlong(rng.permutation(pool), context)
        batches, rest = _fill(stream, num_batches, batch_tokens)
        if best is None or int(rest.max(initial=0)) < least:
            best, least = batches, int(rest.max(initial=0))
    assert best is not None
    return best


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


def _that_fit(near: IntArray, room: int) -> tuple[list[int], int]:
    """Positions, in order, of sequences that still fit, and the room they leave."""
    taken = []
    for at, length in enumerate(near.tolist()):
        if length <= room:
            taken.append(at)
            room -= length
        if not room:
            break
    return taken, room


def _fill(stream: IntArray, num_batches: int, batch_tokens: int) -> tuple[list[IntArray], IntArray]:
    """Batches of exactly `batch_tokens` and what is left; the order is kept but for sequences that wait."""
    batches: list[IntArray] = []
    for _ in range(num_batches):
        end = np.cumsum(stream)
        count = int(np.searchsorted(end, batch_tokens, side="right"))
        room = batch_tokens - (int(end[count - 1]) if count else 0)
        batch, rest = stream[:count], stream[count:]
        taken, room = _that_fit(rest[:_LOOK_AHEAD], room)
        batch, rest = np.append(batch, rest[taken]), np.delete(rest, taken)
        if room:
            # Divide the shortest sequence near by that is long enough; the one that waits always is.
            near = rest[:_LOOK_AHEAD]
            at = int(np.where(near >= room, near, np.iinfo(np.int64).max).argmin())
            left = int(rest[at]) - room
            batch = np.append(batch, room)
            rest = np.concatenate([rest[:at], [left] if left else [], rest[at + 1 :]]).astype(np.int64)
        batches.append(batch)
        stream = rest
    return batches, stream
