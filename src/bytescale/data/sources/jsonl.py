"""JSON lines: one record a line, blank lines are none; plain, or compressed with gzip, bzip2, xz or zstd.

Cost: the bytes of a chunk.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytescale.config.data import DocumentsConfig
from bytescale.data.optional import one_line
from bytescale.data.sources.chunks import Chunk, Limits, Position
from bytescale.data.sources.content import Document, content_of, kind_of
from bytescale.data.sources.raw import BOM, decompressing, foreign, opened
from bytescale.errors import UserError


def line_chunks(path: Path, begin: Position, limits: Limits) -> Iterator[Chunk]:
    """The lines of a file from `begin` on.

    Raises:
        OSError: the file cannot be read.
    """
    lines: list[bytes] = []
    size, number, failure = 0, 0, None
    try:
        with opened(path) as file, decompressing(path):
            for number, line in enumerate(file, start=1):
                if number <= begin.record:
                    continue
                lines.append(line)
                size += len(line)
                if size >= limits.num_bytes or len(lines) >= limits.num_records:
                    end = Position(begin.file, number)
                    yield Chunk(begin, end, tuple(lines))
                    begin, lines, size = end, [], 0
    except UserError as error:
        failure = str(error)
    if lines or failure is not None:
        end = Position(begin.file, begin.record + len(lines)) if failure is None else Position(begin.file + 1)
        yield Chunk(begin, end, tuple(lines), failure)


def line_documents(chunk: Chunk, path: Path, name: str, config: DocumentsConfig) -> Iterator[Document | UserError]:
    """The documents of some lines; an error in place of a line that holds none."""
    for number, line in enumerate(chunk.lines, start=chunk.begin.record + 1):
        line = line.removeprefix(BOM)
        if line and not line.isspace():
            try:
                record = _record(line, path, number, config)
                content = content_of(record, f"{path}:{number}", config)
                if b"\\u" in line:
                    # JSON can escape half of a surrogate pair, which no UTF-8 text and no tokenizer can hold.
                    json.dumps(record, ensure_ascii=False).encode("utf-8")
                yield Document(f"{name}:{number}", content)
            except UnicodeEncodeError:
                yield UserError(f"{path}:{number}: it holds half of a surrogate pair; it is not valid text")
            except UserError as error:
                yield error


def _record(line: bytes, path: Path, number: int, config: DocumentsConfig) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = foreign(line) if number == 1 else None
        if what is None and number == 1 and line.strip() == b"[":
            what = "is one JSON array; write one object a line"
        message = f"{path} {what}" if what else f"{path}:{number} is not a line of JSON: {one_line(error)}"
        raise UserError(message) from None
    if not isinstance(record, dict):
        raise UserError(
            f'{path}:{number} holds {kind_of(record)}; each line must be an object with "{config.wanted_fields[0]}"'
        )
    return record
