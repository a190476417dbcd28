"""Tables: parquet files, Arrow files and the directories that `datasets` saves, read with pyarrow alone.

A record is a row; only the columns that were asked for are read. Arrow files are memory-mapped. A directory is one that
`Dataset.save_to_disk` wrote, whose `state.json` names its files in order, or any with `.arrow` files in it.

Cost: a row group of parquet, the rows of a chunk of Arrow.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytescale.config.data import DocumentsConfig
from bytescale.data.optional import one_line, require
from bytescale.data.sources.chunks import Chunk, Limits, Position
from bytescale.data.sources.content import (
    BYTES,
    CHAT,
    MESSAGE_KEYS,
    TOKEN_IDS,
    Document,
    content_of,
    fields_of,
    no_text,
    value_of,
)
from bytescale.data.sources.raw import HEAD_BYTES, foreign
from bytescale.errors import UserError, nearest

_MAGIC = {"parquet": b"PAR1", "arrow": b"ARROW1"}


def table_chunks(path: Path, begin: Position, limits: Limits, config: DocumentsConfig) -> Iterator[Chunk]:
    """The rows of a file from `begin` on: row groups of parquet, record batches of Arrow.

    Raises:
        UserError: the file is damaged, or of another kind, or lacks the column.
    """
    first = begin.record
    for end in _block_ends(path, limits, config):
        if end > first:
            yield Chunk(Position(begin.file, first), Position(begin.file, end))
            first = end


def row_documents(chunk: Chunk, path: Path, name: str, config: DocumentsConfig) -> Iterator[Document | UserError]:
    """The documents of some rows; an error in place of a row that holds none.

    Raises:
        UserError: the rows cannot be read.
    """
    number = chunk.begin.record
    try:
        for batch in _batches(path, chunk, config):
            for record in batch.to_pylist():
                try:
                    yield Document(f"{name}:{number}", content_of(record, f"{path}:{number}", config))
                except UserError as error:
                    yield error
                number += 1
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(path, config, error, number) from error


def saved_files(directory: Path) -> list[str]:
    """The Arrow files of a directory that `datasets` saved, in order; empty where there are none.

    Raises:
        UserError: it holds several splits, or rows that were picked by an index beside the files.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in directory.glob("*/state.json"))
        raise UserError(f"{directory} holds the splits {', '.join(splits)}; add one to data.path")
    try:
        state = json.loads((directory / "state.json").read_bytes())
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise UserError(f"{directory} holds an index of picked rows; save it after `flatten_indices()`")
        return [entry["filename"] for entry in state["_data_files"]]
    except FileNotFoundError:
        return sorted(path.name for path in directory.glob("*.arrow"))
    except (OSError, LookupError, AttributeError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {directory / 'state.json'}: {one_line(error)}") from None


def _block_ends(path: Path, limits: Limits, config: DocumentsConfig) -> list[int]:
    """Rows up to the end of each block that can be read by itself."""
    ends, num_rows = [], 0
    try:
        if config.source == "parquet":
            with _parquet(config).ParquetFile(path) as file:
                _check_columns(file.schema_arrow, path, config)
                groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
        else:
            table = _arrow_table(path, config)
            _check_columns(table.schema, path, config)
            sizes = [
                (batch.num_rows, batch.nbytes) for batch in table.select(_columns(table.schema, config)).to_batches()
            ]
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(path, config, error, 0) from error
    for rows, size in sizes:
        # Blocks of many records are cut further; one of few is read whole.
        parts = max(1, -(-size // limits.num_bytes) if config.source == "arrow" else 1, -(-rows // limits.num_records))
        ends += [num_rows + rows * (part + 1) // parts for part in range(parts)]
        num_rows += rows
    return ends


def _batches(path: Path, chunk: Chunk, config: DocumentsConfig) -> Iterator[Any]:
    """Record batches of the wanted columns of the rows of `chunk`."""
    first, last = chunk.begin.record, chunk.end.record
    if config.source == "arrow":
        table = _arrow_table(path, config)
        yield from table.select(_columns(table.schema, config)).slice(first, last - first).to_batches()
        return
    with _parquet(config).ParquetFile(path) as file:
        columns, row = _columns(file.schema_arrow, config), 0
        for group in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            begin, end = max(first - row, 0), min(last - row, num_rows)
            if begin < end:
                yield from file.read_row_group(group, columns=columns).slice(begin, end - begin).to_batches()
            row += num_rows


def _arrow_table(path: Path, config: DocumentsConfig) -> Any:
    """All rows of an Arrow file, in the file or the stream format; mapped, not read."""
    arrow = require("pyarrow", "data", 'data.source = "arrow"')
    mapped = arrow.memory_map(str(path))
    with open(path, "rb") as file:
        is_file = file.read(6) == _MAGIC["arrow"]
    reader = arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)
    return reader.read_all()


def _parquet(config: DocumentsConfig) -> Any:
    return require("pyarrow.parquet", "data", 'data.source = "parquet"')


def _damaged(path: Path, config: DocumentsConfig, error: Exception, row: int) -> UserError:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    what = None if head.startswith(_MAGIC[str(config.source)]) else foreign(head)
    if what is not None:
        return UserError(f"{path} {what}")
    return UserError(f"cannot read {path} as {config.source} (row {row}): {one_line(error)}")


def _columns(schema: Any, config: DocumentsConfig) -> list[str]:
    """The top-level columns that hold what is wanted."""
    wanted = config.wanted_fields
    return [name for name in schema.names if name in wanted or any(field.startswith(f"{name}.") for field in wanted)]


def _check_columns(schema: Any, path: Path, config: DocumentsConfig) -> None:
    """Whether the table has the column that is asked for, of the right type.

    Raises:
        UserError: it does not; says what it has.
    """
    types = require("pyarrow", "data", f'data.source = "{config.source}"').types
    record = {name: _held(schema.field(name).type, types) for name in schema.names}
    field = config.wanted_fields[0]
    found, held = value_of(record, field)
    wanted = {"text": "text", "messages": CHAT, "tokens": TOKEN_IDS}[config.content]
    if found and held in (wanted, "null"):
        return
    known = dict(fields_of(record, str))
    held = None if not found else "an object" if isinstance(held, dict) else held
    if config.content == "text":
        raise no_text(str(path), config.text_field, held, known)
    problem = f'has no "{field}"' if not found else f'holds {held} in "{field}", not {wanted}'
    fitting = [name for name, kind in known.items() if kind == wanted] or list(known)
    raise UserError(f"{path} {problem}; set data.{config.content}_field ({nearest(field, fitting)})")


def _held(kind: Any, types: Any) -> Any:
    """What a column of this Arrow type holds, in the words of `content.kind_of`; a struct as a table of its fields."""
    if types.is_struct(kind):
        return {kind.field(i).name: _held(kind.field(i).type, types) for i in range(kind.num_fields)}
    if types.is_dictionary(kind):
        return _held(kind.value_type, types)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _held(kind.value_type, types)
        if isinstance(inner, dict):
            return CHAT if MESSAGE_KEYS & inner.keys() else "a list"
        return TOKEN_IDS if types.is_integer(kind.value_type) else "a list"
    if types.is_null(kind):
        return "null"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return BYTES
    return f"values of type {kind}"
