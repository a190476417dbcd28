"""Text files, each of them one document; UTF-8, with or without a byte-order mark, plain or compressed.

Text is not stripped or normalised. Cost: the whole file.
"""

import io
from collections.abc import Iterator
from pathlib import Path

from bytescale.data.sources.chunks import Chunk, Limits, Position
from bytescale.data.sources.content import Document
from bytescale.data.sources.raw import BOM, decompressing, foreign, opener
from bytescale.errors import UserError


def file_chunks(paths: list[Path], begin: Position, limits: Limits) -> Iterator[Chunk]:
    """The files from `begin` on, several to a chunk.

    Raises:
        OSError: a file is gone.
    """
    first, size = begin.file + begin.record, 0
    for number in range(first, len(paths)):
        size += paths[number].stat().st_size
        if size >= limits.num_bytes or number + 1 - first >= limits.num_records or number + 1 == len(paths):
            yield Chunk(Position(first), Position(number + 1))
            first, size = number + 1, 0


def text_document(path: Path, name: str, *, strict: bool) -> Document:
    """The whole file as one document; without `strict`, bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: the file is not UTF-8 text; says what it is where that can be seen.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    decompress = opener(data)
    if decompress is not None:
        with decompressing(path), decompress(io.BytesIO(data)) as file:
            data = file.read()
    try:
        what = foreign(data)
        if strict and what is not None and "tar archive" in what:
            raise UserError(f"{path} {what}")
        return Document(name, data.removeprefix(BOM).decode("utf-8", errors="strict" if strict else "replace"))
    except UnicodeDecodeError as error:
        what = foreign(data) or f"is not UTF-8 text (byte {error.start}); convert it"
        raise UserError(f"{path} {what}, or narrow data.glob to leave it out") from None
