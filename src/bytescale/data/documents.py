"""The documents of one text file, in order, or words that say what the file is if it holds none.

Readers decode UTF-8 without stripping or normalising, skip a byte-order mark, and decompress gzip, bzip2 and xz by the
first bytes of a file, whatever it is called. Invariant: a file that cannot be read or decoded, or a record without
text, is an error that names the place and what is there (zstd, a chat, token ids, bytes), never a silent gap.

Cost: memory of one document; one record batch of `parquet`; the whole file of a `text-tree`.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bytescale.data.optional import one_line, require
from bytescale.errors import UserError, nearest

PARQUET_BATCH_ROWS = 256
"""Rows of one record batch; small, since one row may be a whole book."""

_BOM = b"\xef\xbb\xbf"
_COMPRESSED: tuple[tuple[bytes, Callable[..., Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"\xfd7zXZ\x00", lzma.open),
    *((b"BZh%d1AY&SY" % level, bz2.open) for level in range(1, 10)),
)
_FOREIGN = (
    (b"\x28\xb5\x2f\xfd", "compressed with zstd, which is not supported yet; decompress it, or compress it with gzip"),
    (b"\x04\x22\x4d\x18", "compressed with lz4, which is not supported yet; decompress it, or compress it with gzip"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it"),
    (b"PAR1", 'a parquet file; set data.source = "parquet"'),
    (b"ARROW1", "an Arrow file, which is not supported yet; write it as parquet"),
    (b"\x93NUMPY", "a numpy array; only text is read"),
    (b"\xff\xfe", "UTF-16 text; convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16 text; convert it to UTF-8"),
)
_TAR_AT, _TAR = 257, b"ustar"
_CHAT, _TOKEN_IDS, _BYTES = "a chat (a list of messages)", "token ids (a list of integers)", "bytes"
_NOT_YET = {_CHAT: "chats", _TOKEN_IDS: "token ids", _BYTES: "bytes"}
_MESSAGE_KEYS = {"role", "from", "content", "value"}


@dataclass(frozen=True)
class Document:
    """One raw text. `name` says where it came from: a relative path, or file:line."""

    name: str
    text: str


def unreadable(path: Path | str, error: OSError) -> UserError:
    """The refusal of a file or directory that the system does not let us read."""
    return UserError(f"cannot read {path}: {error.strerror or one_line(error)}")


def text_document(path: Path, name: str, *, strict: bool) -> Document:
    """The whole file as one document; without `strict`, bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: the file is not UTF-8 text; says what it is where that can be seen.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    opener = _opener(data)
    if opener is not None:
        with _decompressing(path), opener(io.BytesIO(data)) as file:
            data = file.read()
    try:
        if strict and data[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
            raise UserError(f"{path} {_foreign(data)}")
        return Document(name, data.removeprefix(_BOM).decode("utf-8", errors="strict" if strict else "replace"))
    except UnicodeDecodeError as error:
        what = _foreign(data) or f"is not UTF-8 text (byte {error.start}); convert it"
        raise UserError(f"{path} {what}, or narrow data.glob to leave it out") from None


def jsonl_documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """One document a line: `text_field` of a JSON object; blank lines are passed over.

    Raises:
        UserError: a line holds no text; names it and what it holds.
        OSError: the file cannot be read.
    """
    with _opened(path) as file, _decompressing(path):
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM)
            if line and not line.isspace():
                yield Document(f"{name}:{number}", _jsonl_text(line, path, number, text_field))


def parquet_documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """One document a row: the text column `text_field`.

    Raises:
        UserError: no such column, or it holds no text; says what it holds.
    """
    parquet = require("pyarrow.parquet", "data", 'data.source = "parquet"')
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            depth = _parquet_column(file.schema_arrow, path, text_field)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[text_field]):
                column = batch.column(0)
                for _ in range(depth):
                    (column,) = column.flatten()
                for value in column:
                    yield Document(f"{name}:{row}", value.as_py() or "")
                    row += 1
    except UserError:
        raise
    except (OSError, ValueError) as error:
        with open(path, "rb") as file:
            head = file.read(_TAR_AT + len(_TAR))
        what = None if head.startswith(b"PAR1") else _foreign(head)
        if what is not None:
            raise UserError(f"{path} {what}") from None
        raise UserError(f"cannot read {path} as parquet (row {row}): {one_line(error)}") from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed."""
    with open(path, "rb") as raw:
        head = raw.read(16)
        raw.seek(0)
        opener = _opener(head)
        if opener is None:
            yield raw
            return
        with opener(raw) as file:
            yield file


def _opener(head: bytes) -> Callable[..., Any] | None:
    """What decompresses a file that begins so; None for one that is not compressed."""
    return next((opener for magic, opener in _COMPRESSED if head.startswith(magic)), None)


@contextmanager
def _decompressing(path: Path) -> Iterator[None]:
    """Turn what broken compressed data raises inside the block into one line."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path} is compressed and damaged or cut short: {one_line(error)}") from None


def _foreign(head: bytes) -> str | None:
    """What a file that is not text is, as the end of a sentence about it; None where its first bytes do not tell."""
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        return "is a tar archive; unpack it"
    return next((f"is {what}" for magic, what in _FOREIGN if head.startswith(magic)), None)


def _jsonl_text(line: bytes, path: Path, number: int, text_field: str) -> str:
    place = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = _foreign(line) if number == 1 else None
        if what is None and number == 1 and line.strip() == b"[":
            what = "is one JSON array; write one object a line"
        raise UserError(f"{path} {what}" if what else f"{place} is not a line of JSON: {one_line(error)}") from None
    if not isinstance(record, dict):
        raise UserError(f'{place} holds {_kind(record)}; each line must be an object with "{text_field}"')
    found, text = _value(record, text_field)
    if found and text is None:
        return ""
    if not isinstance(text, str):
        fields = dict(_fields(record, _kind))
        raise _no_text(place, text_field, _kind(text) if found else None, fields)
    if b"\\u" in line:
        # JSON can escape half of a surrogate pair, which no UTF-8 text and no tokenizer can hold.
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f'{place}: "{text_field}" holds half of a surrogate pair; it is not valid text') from None
    return text


def _value(record: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Whether `record` has `field`, a key or a path of keys with dots between, and its value; null has every key."""
    if field in record:
        return True, record[field]
    head, _, rest = field.partition(".")
    inner = record.get(head, "")
    if rest and inner is None:
        return True, None
    return _value(inner, rest) if rest and isinstance(inner, dict) else (False, None)


def _fields(record: dict[str, Any], kind: Callable[[Any], str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and kind of every value in `record` that is no object, the names of inner ones with dots between."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _fields(value, kind, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, list) and value:
        if all(type(entry) is int for entry in value):
            return _TOKEN_IDS
        return _CHAT if all(isinstance(entry, dict) and _MESSAGE_KEYS & entry.keys() for entry in value) else "a list"
    kinds = {str: "text", list: "an empty list", dict: "an object", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _no_text(place: str, text_field: str, held: str | None, fields: dict[str, str]) -> UserError:
    """The refusal of a record or table whose `text_field` is `held`, or that lacks it; `fields` is what there is."""
    problem = f'{place} has no "{text_field}"' if held is None else f'{place}: "{text_field}" holds {held}, not text'
    texts = [name for name, kind in fields.items() if kind == "text"]
    asked = {text_field: held} if held is not None else fields
    name, kind = next(((name, kind) for name, kind in asked.items() if kind in _NOT_YET), ("", ""))
    if kind:
        what = "" if held is not None else f'; "{name}" holds {kind}'
        there = f" (there is text in {', '.join(texts[:4])})" if texts else ""
        return UserError(f"{problem}{what}: {_NOT_YET[kind]} are not supported yet, only plain text is{there}")
    if held == "an object":
        texts = [name for name in texts if name.startswith(f"{text_field}.")] or texts
    if not texts:
        return UserError(f"{problem}, and nothing else there is text")
    return UserError(f"{problem}; set data.text_field ({nearest(text_field, texts)})")


def _parquet_column(schema: Any, path: Path, text_field: str) -> int:
    """Check the column that holds the text; returns how deep it lies in structs."""
    types = require("pyarrow", "data", 'data.source = "parquet"').types
    record = {name: _arrow_fields(schema.field(name).type, types) for name in schema.names}
    found, column = _value(record, text_field)
    if not found or column not in ("text", "null"):
        held = None if not found else "an object" if isinstance(column, dict) else column
        raise _no_text(str(path), text_field, held, dict(_fields(record, str)))
    return 0 if text_field in record else text_field.count(".")


def _arrow_fields(kind: Any, types: Any) -> Any:
    """What a column of this Arrow type holds, in the words of `_kind`; a struct as a table of its fields."""
    if types.is_struct(kind):
        return {kind.field(i).name: _arrow_fields(kind.field(i).type, types) for i in range(kind.num_fields)}
    if types.is_dictionary(kind):
        return _arrow_fields(kind.value_type, types)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _arrow_fields(kind.value_type, types)
        if isinstance(inner, dict):
            return _CHAT if _MESSAGE_KEYS & inner.keys() else "a list"
        return _TOKEN_IDS if types.is_integer(kind.value_type) else "a list"
    if types.is_null(kind):
        return "null"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _BYTES
    return f"values of type {kind}"
