"""Tokenising in shards, so that an interrupted build resumes after the last shard it finished.

A shard holds the tokens of consecutive documents and says where the next one begins; its file is named by where it
begins itself. The files of a directory form the journal: a build follows them from the first document on, from the end
of one to the beginning of the next, and tokenises what comes after. Invariants: a shard appears whole or not at all, is
never changed, and depends on the data, the encoder and where it begins and ends alone, so several processes, on one
machine or on many, may fill one directory without knowing of each other, and however many workers tokenise, the same
shards are made in the same order.

A shard is at least 1/64 of all before it: at most about that much work is done twice, and their number stays small.
Cost: memory of one shard, at most 32 MiB of text; the disk holds everything twice until the build is done.
"""

import contextlib
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.data.encoding.encoder import Encoded, Encoder
from bytescale.data.sources.chunks import Chunk, Limits, Position
from bytescale.data.sources.source import DocumentSource, chunks, documents
from bytescale.data.workers import in_workers
from bytescale.files import sync

CHUNK_BYTES = 1 << 20
CHUNK_RECORDS = 1024
SHARD_SHARE = 1 / 64
SHARD_BYTES = 1 << 25


@dataclass(frozen=True, eq=False)
class Shard:
    """Tokenised documents that follow each other.

    Attributes:
        encoded: the documents.
        num_bytes: about how much of the data they were.
        end: where the next document begins.
    """

    encoded: Encoded
    num_bytes: int
    end: Position


def shards(
    source: DocumentSource, encoder: Encoder, directory: Path, num_workers: int | None = None
) -> Iterator[Shard]:
    """The whole source: the shards that `directory` holds, then new ones, which are kept there, but for the last.

    Args:
        source: the documents.
        encoder: makes the tokens.
        directory: the journal.
        num_workers: processes that tokenise; None is this one.

    Raises:
        UserError: a document cannot be read or tokenised.
    """
    begin, num_bytes = Position(), 0
    while (kept := _read(directory, begin)) is not None:
        yield kept
        begin, num_bytes = kept.end, num_bytes + kept.num_bytes
    found = chunks(source, begin, Limits(CHUNK_BYTES, CHUNK_RECORDS))
    open_shard: list[Shard] = []
    for part in _encoded(source, encoder, found, num_workers):
        # Written when more follows: the last shard of a source is never looked for, since its entry is then whole.
        size = sum(part.num_bytes for part in open_shard)
        if open_shard and size >= min(SHARD_BYTES, SHARD_SHARE * num_bytes):
            shard = _joined(open_shard)
            _write(directory, begin, shard)
            yield shard
            begin, num_bytes, open_shard = shard.end, num_bytes + size, []
        open_shard.append(part)
    if open_shard:
        yield _joined(open_shard)


def _encoded(
    source: DocumentSource, encoder: Encoder, found: Iterable[Chunk], num_workers: int | None
) -> Iterator[Shard]:
    """The chunks in order, encoded here or by workers."""
    encode: Callable[[Chunk], Shard] = ChunkEncoder(source, encoder)
    return map(encode, found) if num_workers is None else in_workers(encode, found, num_workers)


@dataclass(frozen=True)
class ChunkEncoder:
    """Reads and encodes a chunk; travels to workers whole."""

    source: DocumentSource
    encoder: Encoder

    def __call__(self, chunk: Chunk) -> Shard:
        """Tokens of the documents of `chunk`."""
        encoded = self.encoder.encode(documents(self.source, chunk))
        # A token is a few bytes of text: what matters is only that chunks can be compared.
        return Shard(encoded, sum(map(len, chunk.lines)) or 4 * len(encoded.tokens), chunk.end)


def _joined(parts: list[Shard]) -> Shard:
    encoded = [part.encoded for part in parts]
    masks = [part.mask for part in encoded if part.mask is not None]
    return Shard(
        Encoded(
            np.concatenate([part.tokens for part in encoded]),
            np.concatenate([part.lengths for part in encoded]),
            np.concatenate([part.digests for part in encoded]),
            np.concatenate(masks) if masks else None,
            sum(part.num_skipped for part in encoded),
            next((part.failure for part in encoded if part.failure), ""),
        ),
        sum(part.num_bytes for part in parts),
        parts[-1].end,
    )


def _path(directory: Path, begin: Position) -> Path:
    return directory / f"{begin.file}-{begin.record}.npz"


def _read(directory: Path, begin: Position) -> Shard | None:
    """The shard that begins there; None if it is missing or damaged."""
    try:
        with np.load(_path(directory, begin), allow_pickle=False) as arrays:
            file, record, num_bytes, num_skipped = map(int, arrays["numbers"])
            mask = arrays.get("mask")
            encoded = Encoded(
                arrays["tokens"], arrays["lengths"], arrays["digests"], mask, num_skipped, str(arrays["failure"])
            )
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error):
        return None
    end, num_tokens = Position(file, record), len(encoded.tokens)
    if end <= begin or int(encoded.lengths.sum()) != num_tokens or len(encoded.digests) != len(encoded.lengths):
        return None
    return Shard(encoded, num_bytes, end) if mask is None or len(mask) == num_tokens else None


def _write(directory: Path, begin: Position, shard: Shard) -> None:
    """Keep a shard. One that cannot be kept costs no more than the work to make it again."""
    temporary = directory / f"{uuid.uuid4().hex}.tmp"
    encoded = shard.encoded
    columns: dict[str, Any] = {} if encoded.mask is None else {"mask": encoded.mask}
    with contextlib.suppress(OSError):
        directory.mkdir(exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                np.savez(
                    file,
                    tokens=encoded.tokens,
                    lengths=encoded.lengths,
                    digests=encoded.digests,
                    numbers=np.array([*shard.end, shard.num_bytes, encoded.num_skipped], dtype=np.int64),
                    failure=np.array(encoded.failure),
                    **columns,
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, _path(directory, begin))
            sync(directory)
        finally:
            temporary.unlink(missing_ok=True)


class NpyWriter:
    """A one-dimensional .npy file whose length is known only at the end.

    numpy leaves room in the header for any length, so the header is written again in place when the file closes.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._num_items = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._write_header()
        self._data_begin = self._file.tell()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._num_items,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._num_items += len(values)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()
                assert self._file.tell() == self._data_begin
                self._file.flush()
                os.fsync(self._file.fileno())
