"""Numbers as people read them: three significant digits and a unit. Pure functions of a float."""

import math


def count(value: float) -> str:
    """A count: 950, 12.3k, 4.56M."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{significant(value / factor)}{suffix}"
    return significant(value)


def size(num_bytes: float) -> str:
    """A number of bytes in binary units: 512 B, 1.50 GiB."""
    for factor, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{significant(num_bytes / factor)} {suffix}"
    return f"{significant(num_bytes)} B"


def duration(seconds: float) -> str:
    """A duration: 350 us, 12.5 ms, 3.20 s, 4 min 05 s, 2 h 03 min."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1e-3:
        return f"{significant(seconds * 1e6)} us"
    if abs(seconds) < 1:
        return f"{significant(seconds * 1e3)} ms"
    if abs(seconds) < 100:
        return f"{significant(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def significant(value: float) -> str:
    """Three significant digits without an exponent where that is short; whole numbers below 1,000 stay whole."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 1e-3:
        return f"{value:#.3g}"
    return f"{value:.2e}"
