"""Where sequence lengths come from: files, named distributions, and batches drawn from them.

A source is a table of ranges with weights (a single length is a range of one) and, for files that list sequences one
by one, the list itself in its own order. Files: `.json` list, `.csv` with `length[,count]` or `range,count`, `.txt`
with one number a line, `.npy`, `.parquet`. Inside a range lengths follow a power density s^-a.

`github` and `byted` are generators made to meet the shares the ByteScale paper states: byted 80 % of the sequences
up to 4K, 1 % from 128K with 44.3 % of the tokens, 37 % of the tokens above 256K, 0.05 % of 2M with 12.1 %; github
16.2 % of the tokens above 128K and 9.8 % above 256K. What it does not state is ours. K is 1,024; 2M is 2,097,152.

Batches depend on source, size and seed alone. Cost: O(drawn sequences), numpy; pyarrow only for parquet.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bytescale.arrays import FloatArray, IntArray
from bytescale.errors import UserError, nearest
from bytescale.files import StrPath

_K = 1024
_LARGEST_FILE_BYTES = 64 * 2**20
_LARGEST_LENGTH = 2**48


@dataclass(frozen=True)
class LengthSource:
    """Lengths to draw from.

    Attributes:
        name: for tables and messages.
        low, high: inclusive ranges. Shape [num_ranges].
        weight: relative number of sequences in each range.
        exponent: a of the density s^-a inside each range.
        listed: the sequences of a file in its order, or None for a distribution.
        max_length: longer draws are cut to this.
        lognormal: (mean, sigma, min) in place of the table.
    """

    name: str
    low: IntArray
    high: IntArray
    weight: FloatArray
    exponent: FloatArray
    listed: IntArray | None = None
    max_length: int | None = None
    lognormal: tuple[float, float, int] | None = None


def _table(
    name: str, low: npt.ArrayLike, high: npt.ArrayLike, weight: npt.ArrayLike, exponent: npt.ArrayLike = 1.0
) -> LengthSource:
    lows = np.asarray(low, np.int64)
    exponents = np.broadcast_to(np.asarray(exponent, np.float64), lows.shape)
    return LengthSource(name, lows, np.asarray(high, np.int64), np.asarray(weight, np.float64), exponents)


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


def _from_token_shares(name: str, rows: tuple[tuple[int, float, float], ...]) -> LengthSource:
    low = np.array([max(_SHORTEST, edge * _K) for edge, _, _ in rows])
    high = np.append(low[1:] - 1, low[-1])
    exponent = np.array([a for _, _, a in rows], np.float64)
    share = np.array([s for _, s, _ in rows], np.float64)
    return _table(name, low, high, share / _mean_in_range(low, high, exponent), exponent)


def _power_integral(low: FloatArray, high: FloatArray, power: FloatArray) -> FloatArray:
    """Integral of s^power from low to high."""
    next_power = power + 1.0
    logarithmic = np.abs(next_power) < 1e-12
    safe = np.where(logarithmic, 1.0, next_power)
    return np.where(logarithmic, np.log(high / low), (high**safe - low**safe) / safe)


def _mean_in_range(low: IntArray, high: IntArray, exponent: FloatArray) -> FloatArray:
    begin, end = low.astype(np.float64), high.astype(np.float64) + 1.0
    return _power_integral(begin, end, 1.0 - exponent) / _power_integral(begin, end, -exponent) - 0.5


DISTRIBUTIONS = ("github", "byted", "wikipedia", "wlb", "magiattention", "lognormal")
"""Names that need no file."""


def length_source(text: str) -> LengthSource:
    """A source from what a person wrote: a file, a name, or `name:key=value,...`.

    The key of every distribution is `max`; lognormal has `mean`, `sigma` and `min` too.

    Raises:
        UserError: no such file or name, an unknown key, or a file that holds no lengths.
    """
    name, _, rest = text.partition(":")
    if name in DISTRIBUTIONS:
        return _named(name, rest)
    path = Path(text)
    if path.exists():
        return read_lengths(path)
    if path.suffix or "/" in text:
        raise UserError(f"cannot read lengths {text}: no such file")
    raise UserError(f"unknown length source {text!r}; {nearest(name, DISTRIBUTIONS)}, or a file")


def _named(name: str, rest: str) -> LengthSource:
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
        return replace(_from_token_shares(name, _GITHUB if name == "github" else _BYTED), max_length=max_length)
    text = resources.files("bytescale").joinpath("resources", "lengths", f"{name}.csv").read_text(encoding="utf-8")
    return replace(_parse_csv(text, name), listed=None, max_length=max_length)


def read_lengths(path: StrPath) -> LengthSource:
    """The lengths stored in a file.

    Raises:
        UserError: unreadable, too large, of an unknown kind, or not lengths; names the file and the place.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE_BYTES and path.suffix not in (".npy", ".parquet"):
            raise UserError(
                f"{path} has {size / 2**20:.0f} MiB; text files of lengths are read up to "
                f"{_LARGEST_FILE_BYTES >> 20} MiB: use .npy, or .csv with length,count"
            )
        if path.suffix == ".npy":
            return _listed(np.load(path, allow_pickle=False), str(path))
        if path.suffix == ".parquet":
            return _read_parquet(path)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read lengths {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file of lengths") from None
    except (ValueError, EOFError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} holds no array of lengths: {error}") from None
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path} is not JSON: {error}") from None
        if not isinstance(value, list):
            raise UserError(f"{path} must hold a JSON list of lengths")
        return _listed(value, str(path))
    if path.suffix == ".csv":
        return _parse_csv(text, str(path))
    if path.suffix == ".txt":
        return _parse_lines(text, str(path))
    raise UserError(f"{path}: lengths come as .json, .csv, .txt, .npy or .parquet")


def _listed(values: object, name: str) -> LengthSource:
    """A source of sequences one by one; values are checked when planned, so zero and negative ones are named there."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise UserError(f"{name} must hold a flat list of lengths") from None
    if array.ndim != 1:
        raise UserError(f"{name} must hold a flat list of lengths")
    if not array.size:
        raise UserError(f"{name} holds no lengths")
    lengths = checked_lengths(array, name)
    distinct, counts = np.unique(lengths, return_counts=True)
    return replace(_table(name, distinct, distinct, counts), listed=lengths)


def checked_lengths(values: npt.NDArray[np.generic], where: str) -> IntArray:
    """Positive whole numbers as int64.

    Raises:
        UserError: names the first entry that is not one.
    """
    if values.dtype.kind in "iuf":
        numbers = values.astype(np.float64)
        broken = ~(
            np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= 1) & (numbers <= _LARGEST_LENGTH)
        )
        if not broken.any():
            return values.astype(np.int64)
        i = int(np.flatnonzero(broken)[0])
    else:
        i = next((k for k, v in enumerate(values.tolist()) if not isinstance(v, int) or isinstance(v, bool)), 0)
    raise UserError(
        f"{where}: entry {i} is {values[i].item() if hasattr(values[i], 'item') else values[i]!r}; "
        "a length is a whole number of at least 1 token"
    )


def _read_parquet(path: Path) -> LengthSource:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow (pip install 'bytescale[data]')") from None
    try:
        table = pq.read_table(path)
    except Exception as error:
        raise UserError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None
    column = next((n for n in ("length", "length_tokens", "num_tokens") if n in table.column_names), None)
    if column is None:
        if len(table.column_names) != 1:
            raise UserError(f"{path} needs a column length; it has {', '.join(table.column_names)}")
        column = table.column_names[0]
    return _listed(table[column].to_numpy(), f"{path}, column {column}")


def _parse_lines(text: str, name: str) -> LengthSource:
    numbers = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word and not word.startswith("#"):
            numbers.append(_whole(word, f"{name} line {number}"))
    return _listed(numbers, name)


def _parse_csv(text: str, name: str) -> LengthSource:
    """`length[,count]` with or without a header, or `range,count` with ranges such as [0, 10]; # starts a comment.

    A header with a column whose name begins with `length` decides: lengths come from it, counts from a column whose
    name begins with `count`, and other columns are passed over.
    """
    low: list[int] = []
    high: list[int] = []
    count: list[int] = []
    any_range = False
    length_column, count_column = 0, 1
    lines = "\n".join("" if line.startswith("#") else line for line in text.splitlines())
    for number, row in enumerate(csv.reader(io.StringIO(lines)), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        where = f"{name} line {number}"
        span = re.fullmatch(r"[\[(]\s*(\d+)\s*[,;-]\s*(\d+)\s*[\])]", cells[0])
        if not low and not span and re.search(r"[A-Za-z]", cells[0]) and cells[0].lower() not in ("nan", "inf"):
            length_column, count_column = _columns(cells)
            continue
        any_range |= span is not None
        if len(cells) <= length_column:
            raise UserError(f"{where} has {len(cells)} columns, the length is in column {length_column + 1}")
        begin, end = (int(span[1]), int(span[2])) if span else (_whole(cells[length_column], where),) * 2
        if span and end < max(begin, 1):
            raise UserError(f"{where}: the range {cells[0]} is empty")
        low.append(max(begin, 1) if span else begin)
        high.append(end)
        has_count = len(cells) > count_column and cells[count_column]
        count.append(_whole(cells[count_column], where, "count") if has_count else 1)
    if not low:
        raise UserError(f"{name} holds no lengths")
    if not any_range and sum(count) <= 50_000_000:
        lengths = checked_lengths(np.repeat(np.array(low), np.array(count)), name)
        if not len(lengths):
            raise UserError(f"{name} holds no lengths")
        return replace(_table(name, low, high, count), listed=lengths)
    if not any(count):
        raise UserError(f"{name} holds no lengths")
    return _table(name, low, high, count)


def _columns(header: list[str]) -> tuple[int, int]:
    """(column of lengths, column of counts); a count column beyond the row means one each."""
    names = [name.lower() for name in header]
    lengths = [i for i, name in enumerate(names) if name.startswith("length")]
    if not lengths:
        return 0, 1
    return lengths[0], next((i for i, name in enumerate(names) if name.startswith("count")), len(names))


def _whole(word: str, where: str, what: str = "length") -> int:
    try:
        value = int(word)
    except ValueError:
        value = 0 if what == "length" else -1
    if value < (1 if what == "length" else 0) or value > _LARGEST_LENGTH:
        raise UserError(f"{where}: {what} {word!r} is not a whole number of at least {1 if what == 'length' else 0}")
    return value


def draw(source: LengthSource, num_sequences: int, rng: np.random.Generator) -> IntArray:
    """Independent draws. Shape [num_sequences]."""
    if source.lognormal is not None:
        mean, sigma, shortest = source.lognormal
        values = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_sequences)
        clipped: IntArray = np.clip(values.astype(np.int64), shortest, source.max_length or _LARGEST_LENGTH)
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
    """One global batch of so many sequences, or of exactly so many tokens (the last sequence is shortened)."""
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
    rng = np.random.default_rng(seed)
    for _ in range(num):
        yield draw_batch(source, rng, tokens=tokens, sequences=sequences)
