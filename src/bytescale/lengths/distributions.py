"""Named distributions of lengths: generators made to meet published shares, shipped histograms, and lognormal.

`github` and `byted` meet the shares the ByteScale paper states: byted 80 % of the sequences up to 4K, 1 % from 128K
with 44.3 % of the tokens, 37 % of the tokens above 256K, 0.05 % of 2M with 12.1 %; github 16.2 % of the tokens above
128K and 9.8 % above 256K. What it does not state is ours. K is 1,024; 2M is 2,097,152.
"""

from dataclasses import replace
from importlib import resources

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.errors import UserError, nearest
from bytescale.lengths.files import parse_csv
from bytescale.lengths.table import LengthSource, length_table

DISTRIBUTIONS = ("github", "byted", "wikipedia", "wlb", "magiattention", "lognormal")
"""Names that need no file."""

_K = 1024
# Lower edges in K tokens, share of the tokens in per cent, exponent of the density inside the bucket.
_GITHUB = (
    (0, 34.1, 1.0),
    (4, 9.5, 3.0),
    (8, 10.4, 3.0),
    (16, 10.7, 3.0),
    (32, 10.3, 3.0),
    (64, 8.8, 3.0),
    (128, 6.4, 3.0),
    (256, 4.5, 3.0),
    (512, 2.7, 3.0),
    (1024, 1.6, 3.0),
    (2048, 1.0, 0.0),
)
_BYTED = (
    (0, 13.9, 0.53),
    (4, 5.0, 3.0),
    (8, 6.0, 3.0),
    (16, 8.0, 3.0),
    (32, 10.0, 3.0),
    (64, 12.8, 3.0),
    (128, 7.3, 5.0),
    (256, 16.5, 5.0),
    (512, 5.0, 5.0),
    (1024, 3.4, 5.0),
    (2048, 12.1, 0.0),
)
_SHORTEST = 64


def source_of_token_shares(name: str, rows: tuple[tuple[int, float, float], ...]) -> LengthSource:
    """Lengths by shares of the tokens; rows of lower edge in K tokens, per cent, exponent of the density inside."""
    low = np.array([max(_SHORTEST, edge * _K) for edge, _, _ in rows])
    high = np.append(low[1:] - 1, low[-1])
    exponent = np.array([a for _, _, a in rows], np.float64)
    share = np.array([s for _, s, _ in rows], np.float64)
    return length_table(name, low, high, share / _mean_in_range(low, high, exponent), exponent)


def _power_integral(low: FloatArray, high: FloatArray, power: FloatArray) -> FloatArray:
    """Integral of s^power from low to high."""
    next_power = power + 1.0
    logarithmic = np.abs(next_power) < 1e-12
    safe = np.where(logarithmic, 1.0, next_power)
    return np.where(logarithmic, np.log(high / low), (high**safe - low**safe) / safe)


def _mean_in_range(low: IntArray, high: IntArray, exponent: FloatArray) -> FloatArray:
    begin, end = low.astype(np.float64), high.astype(np.float64) + 1.0
    return _power_integral(begin, end, 1.0 - exponent) / _power_integral(begin, end, -exponent) - 0.5


def named_distribution(name: str, rest: str) -> LengthSource:
    """The distribution `name` of `DISTRIBUTIONS` with the settings `key=value,...` of `rest`.

    Raises:
        UserError: an unknown key, or a value that is no number above 0.
    """
    known = {"mean": 8192.0, "sigma": 1.2, "min": 16.0, "max": 131072.0} if name == "lognormal" else {"max": 0.0}
    values = dict(known)
    for part in filter(None, rest.split(",")):
        key, _, number = part.partition("=")
        if key not in known:
            raise UserError(f"length source {name} has no key {key!r}; {nearest(key, known)}")
        try:
            values[key] = float(number)
        except ValueError:
            raise UserError(f"length source {name}: {key} is {number!r}; it must be a number") from None
        if not values[key] > 0 or not np.isfinite(values[key]):
            raise UserError(f"length source {name}: {key} is {number}; it must be above 0")
    max_length = int(values["max"]) or None
    if name == "lognormal":
        spec = (values["mean"], values["sigma"], int(values["min"]))
        empty = np.zeros(0, np.int64)
        return LengthSource(name, empty, empty, np.zeros(0), np.zeros(0), max_length=max_length, lognormal=spec)
    if name in ("github", "byted"):
        return replace(source_of_token_shares(name, _GITHUB if name == "github" else _BYTED), max_length=max_length)
    text = resources.files("bytescale").joinpath("resources", "lengths", f"{name}.csv").read_text(encoding="utf-8")
    return replace(parse_csv(text, name), listed=None, max_length=max_length)
