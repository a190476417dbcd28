"""Sizes and times as people write them: 32M tokens, 20 MiB, 10 min.

A number may stand alone, in the plain unit, or before a suffix; upper and lower case are the same. Tokens: K, M and G
are powers of 1,024, as in model names. Bytes: KiB, MiB, GiB, TiB, also K, M, G, T, are powers of 1,024; KB, MB, GB, TB
powers of 1,000.
"""

import re
from fractions import Fraction
from typing import Literal

Unit = Literal["tokens", "bytes", "seconds"]

_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30}
_FACTORS: dict[Unit, dict[str, Fraction]] = {
    "tokens": {name: Fraction(factor) for name, factor in _BINARY.items()},
    "bytes": {
        name: Fraction(factor)
        for power, letter in enumerate("kmgt", start=1)
        for name, factor in (
            (letter, 1024**power),
            (f"{letter}i", 1024**power),
            (f"{letter}ib", 1024**power),
            (f"{letter}b", 1000**power),
        )
    }
    | {"b": Fraction(1)},
    "seconds": {
        "ms": Fraction(1, 1000),
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
    },
}
EXAMPLES: dict[Unit, str] = {
    "tokens": "a number of tokens such as 8192, 32K or 2M",
    "bytes": "a number of bytes such as 65536, 64 KiB or 20 MiB",
    "seconds": "a time such as 90, 90 s or 10 min",
}
"""How a message says what may be written."""

_WRITTEN = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def parse_quantity(text: str, unit: Unit) -> int | float | None:
    """The number that `text` writes, in tokens, bytes or seconds; None where it writes none.

    Tokens and bytes are whole: `1.5K` is 1,536, `0.3K` is nothing.
    """
    match = _WRITTEN.fullmatch(text.strip().lower())
    if match is None:
        return None
    factor = Fraction(1) if not match[2] else _FACTORS[unit].get(match[2])
    if factor is None:
        return None
    value = Fraction(match[1].replace("_", "")) * factor
    if unit == "seconds":
        return float(value)
    return int(value) if value.denominator == 1 else None
