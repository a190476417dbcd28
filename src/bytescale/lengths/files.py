"""Lengths from files: `.json` list, `.csv` with `length[,count]` or `range,count`, `.txt`, `.npy`, `.parquet`.

A `.txt` holds one number a line; a byte-order mark is skipped. Every complaint names the file and the place. Cost: one
pass; pyarrow only for parquet.
"""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray, first_not_whole
from bytescale.errors import UserError
from bytescale.files import StrPath
from bytescale.lengths.table import LARGEST_LENGTH, LengthSource, length_table

_LARGEST_FILE_BYTES = 64 * 2**20


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
        text = path.read_text(encoding="utf-8-sig")
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
        return parse_csv(text, str(path))
    if path.suffix == ".txt":
        return _parse_lines(text, str(path))
    raise UserError(f"{path}: lengths come as .json, .csv, .txt, .npy or .parquet")


def _listed(values: object, name: str) -> LengthSource:
    """A source of sequences one by one; values are checked when planned, so zero and negative ones are named there."""
    try:
        kinds = set(map(type, values)) if isinstance(values, list) else set()
        # numpy would make numbers of truth values and text of numbers beside a text; objects stay themselves.
        as_they_are = not kinds <= {int, float, list}
        array = np.array(values, dtype=object) if as_they_are else np.asarray(values)
    except (ValueError, OverflowError):
        raise UserError(f"{name} must hold a flat list of lengths") from None
    if array.ndim != 1:
        raise UserError(f"{name} must hold a flat list of lengths")
    if not array.size:
        raise UserError(f"{name} holds no lengths")
    lengths = checked_lengths(array, name)
    distinct, counts = np.unique(lengths, return_counts=True)
    return replace(length_table(name, distinct, distinct, counts), listed=lengths)


def checked_lengths(values: npt.NDArray[np.generic], where: str) -> IntArray:
    """Positive whole numbers as int64.

    Raises:
        UserError: names the first entry that is not one.
    """
    i = None if values.dtype.kind in "iuf" else first_not_whole(values.tolist())
    if i is None:
        numbers = values.astype(np.float64)
        broken = ~(np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= 1) & (numbers <= LARGEST_LENGTH))
        if not broken.any():
            return values.astype(np.int64)
        i = int(np.flatnonzero(broken)[0])
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


def parse_csv(text: str, name: str) -> LengthSource:
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
        return replace(length_table(name, low, high, count), listed=lengths)
    if not any(count):
        raise UserError(f"{name} holds no lengths")
    return length_table(name, low, high, count)


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
    if value < (1 if what == "length" else 0) or value > LARGEST_LENGTH:
        raise UserError(f"{where}: {what} {word!r} is not a whole number of at least {1 if what == 'length' else 0}")
    return value
