"""Tokenising in shards, so that an interrupted build resumes after the last shard it finished.

A shard holds the tokens of consecutive documents and says where the next one begins; its file is named by where it
begins itself. The files of a directory form the journal: a build follows them from the first document on, from the end
of one to the beginning of the next, and tokenises what comes after. Invariants: a shard appears whole or not at all, is
never changed, and depends on the data, the tokenizer and where it begins and ends alone, so several processes, on one
machine or on many, may fill one directory without knowing of each other.

A shard is at least 1/64 of all before it: at most about that much work is done twice, and their number stays small.
Cost: memory of one shard, at most 32 Mi characters; the disk holds everything twice until the build is done.
"""

import contextlib
import os
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray
from bytescale.data.documents import Document
from bytescale.data.held_out import DigestArray, content_digests
from bytescale.data.sources import Position, TextSource, documents_from
from bytescale.data.tokenizers import TokenArray, Tokenizer
from bytescale.files import sync

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
SHARD_SHARE = 1 / 64
SHARD_CHARACTERS = 1 << 25


@dataclass(frozen=True, eq=False)
class Shard:
    """Tokenised documents that follow each other.

    Attributes:
        tokens: all of them one after the other. Shape [sum(lengths)].
        lengths: tokens of each document. Shape [num_documents].
        digests: of the contents of each document, before they were tokenised. Shape [num_documents].
        num_characters: characters of their texts.
        end: where the next document begins.
    """

    tokens: TokenArray
    lengths: IntArray
    digests: DigestArray
    num_characters: int
    end: Position


def shards(source: TextSource, tokenizer: Tokenizer, directory: Path) -> Iterator[Shard]:
    """The whole source: the shards that `directory` holds, then new ones, which are kept there, but for the last.

    Raises:
        UserError: a document cannot be read or tokenised.
    """
    begin, num_characters = Position(), 0
    while (kept := _read(directory, begin)) is not None:
        yield kept
        begin, num_characters = kept.end, num_characters + kept.num_characters
    open_shard: list[Shard] = []
    for batch in _batches(documents_from(source, begin)):
        # Written when more follows: the last shard of a source is never looked for, since its entry is then whole.
        size = sum(part.num_characters for part in open_shard)
        if open_shard and size >= min(SHARD_CHARACTERS, SHARD_SHARE * num_characters):
            shard = _joined(open_shard)
            _write(directory, begin, shard)
            yield shard
            begin, num_characters, open_shard = shard.end, num_characters + size, []
        open_shard.append(_tokenised(batch, tokenizer))
    if open_shard:
        yield _joined(open_shard)


def _batches(documents: Iterable[tuple[Document, Position]]) -> Iterator[list[tuple[Document, Position]]]:
    """Documents in groups worth one call of the tokenizer."""
    batch: list[tuple[Document, Position]] = []
    num_characters = 0
    for document, end in documents:
        batch.append((document, end))
        num_characters += len(document.text)
        if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _tokenised(batch: list[tuple[Document, Position]], tokenizer: Tokenizer) -> Shard:
    texts = [document.text for document, _ in batch]
    tokens, lengths = tokenizer.encode(texts)
    return Shard(tokens, lengths, content_digests(texts), num_characters=sum(map(len, texts)), end=batch[-1][1])


def _joined(parts: list[Shard]) -> Shard:
    return Shard(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.digests for part in parts]),
        sum(part.num_characters for part in parts),
        parts[-1].end,
    )


def _path(directory: Path, begin: Position) -> Path:
    return directory / f"{begin.file}-{begin.document}.npz"


def _read(directory: Path, begin: Position) -> Shard | None:
    """The shard that begins there; None if it is missing or damaged."""
    try:
        with np.load(_path(directory, begin), allow_pickle=False) as arrays:
            tokens, lengths, digests = arrays["tokens"], arrays["lengths"], arrays["digests"]
            file, document, num_characters = map(int, arrays["end_and_characters"])
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error):
        return None
    end = Position(file, document)
    if end <= begin or int(lengths.sum()) != len(tokens) or len(digests) != len(lengths):
        return None
    return Shard(tokens, lengths, digests, num_characters, end)


def _write(directory: Path, begin: Position, shard: Shard) -> None:
    """Keep a shard. One that cannot be kept costs no more than the work to make it again."""
    temporary = directory / f"{uuid.uuid4().hex}.tmp"
    with contextlib.suppress(OSError):
        directory.mkdir(exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                numbers = np.array([*shard.end, shard.num_characters], dtype=np.int64)
                np.savez(
                    file,
                    tokens=shard.tokens,
                    lengths=shard.lengths,
                    digests=shard.digests,
                    end_and_characters=numbers,
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
