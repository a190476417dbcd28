"""Tokenised text on disk: made once, memory-mapped by every rank of a node.

An entry is a directory named by its key with `tokens.npy` (all documents one after the other, uint16 when every id
fits, else uint32), `offsets.npy` (int64, document i is tokens[offsets[i]:offsets[i+1]]) and `meta.json` (counts and
file sizes). The key is a digest of source kind, contents, tokenizer and format version: changed text or another
tokenizer is another entry, a moved or touched file is not.

Invariants: an entry appears complete or not at all (built in a temporary directory, then renamed); one process builds
while the others wait on a kernel lock, which falls free when its holder dies; an entry whose files do not have the
sizes that it states is built again. Plain `.npy` and JSON, nothing that runs code when read.

Cost: building streams, memory stays at one batch of documents; opening reads the source once for the key and maps the
tokens.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray
from bytescale.data.sources import Document, TextSource, content_fingerprint, iter_documents
from bytescale.data.tokenizers import TokenArray, Tokenizer
from bytescale.errors import UserError, counted

FORMAT_VERSION = 1
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
NOTIFY_AFTER_S = 5.0


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Tokenised documents.

    Attributes:
        tokens: all documents one after the other, each with its end token; memory-mapped. Shape [num_tokens].
        offsets: document i is tokens[offsets[i]:offsets[i+1]]. Shape [num_documents + 1].
    """

    tokens: TokenArray
    offsets: IntArray

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def default_cache_dir() -> Path:
    """`bytescale` in the user's cache directory (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "bytescale"


def cache_key(source: TextSource, tokenizer: Tokenizer) -> str:
    """Name of the entry that holds `source` in the ids of `tokenizer`.

    Raises:
        UserError: a file of the source cannot be read.
    """
    parts = [f"format {FORMAT_VERSION}", content_fingerprint(source), tokenizer.fingerprint]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=20).hexdigest()


def open_corpus(
    source: TextSource, tokenizer: Tokenizer, cache_dir: str | None = None, notify_after_s: float = NOTIFY_AFTER_S
) -> TokenCorpus:
    """The tokens of `source`, from the cache or built into it.

    Args:
        source: the documents.
        tokenizer: makes the ids.
        cache_dir: directory of entries; None is `default_cache_dir()`.
        notify_after_s: a longer wait for another process that builds the same entry says so on stderr.

    Raises:
        UserError: a file of the source is bad, the source holds no document, or the cache cannot be written.
    """
    directory = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    key = cache_key(source, tokenizer)
    corpus = _load(directory / key)
    if corpus is not None:
        return corpus
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{key}.lock", notify_after_s):
            # Another process may have built it while this one waited.
            corpus = _load(directory / key) or _rebuild(source, tokenizer, directory, key)
    except OSError as error:
        raise UserError(
            f"cannot keep tokenised data in {directory}: {error.strerror or error}; "
            "set data.cache_dir to a directory with room that can be written"
        ) from None
    return corpus


@contextlib.contextmanager
def _locked(path: Path, notify_after_s: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The file stays: removing it would let two holders in."""
    with open(path, "a") as file:
        began = time.monotonic()
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - began >= notify_after_s:
                    print(f"waiting for another process to tokenise the data into {path.parent}", file=sys.stderr)
                    told = True
                time.sleep(0.05)
        yield


def _load(entry: Path) -> TokenCorpus | None:
    """The corpus at `entry`; None when there is none or it is damaged."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        for name, size_bytes in meta["size_bytes"].items():
            if (entry / name).stat().st_size != size_bytes:
                return None
        tokens = np.load(entry / "tokens.npy", mmap_mode="r", allow_pickle=False)
        offsets = np.load(entry / "offsets.npy", allow_pickle=False)
        counts = (meta["num_tokens"], meta["num_documents"])
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if (len(tokens), len(offsets) - 1) != counts or offsets[0] != 0 or offsets[-1] != len(tokens):
        return None
    return TokenCorpus(tokens=tokens, offsets=offsets)


def _rebuild(source: TextSource, tokenizer: Tokenizer, directory: Path, key: str) -> TokenCorpus:
    """Build the entry under the lock, in place of a damaged one and of what dead builders left."""
    for leftover in [*directory.glob(f".{key}.*.tmp"), directory / key]:
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = directory / f".{key}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        _build(source, tokenizer, temporary)
        # A file system whose locks do not reach other hosts may let another builder finish first; its entry is as good.
        with contextlib.suppress(OSError):
            os.rename(temporary, directory / key)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    corpus = _load(directory / key)
    if corpus is None:
        raise OSError(f"entry {key} cannot be read back after writing it")
    return corpus


def _build(source: TextSource, tokenizer: Tokenizer, directory: Path) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    num_tokens = num_documents = 0
    with (
        _NpyWriter(directory / "tokens.npy", dtype) as tokens_file,
        _NpyWriter(directory / "offsets.npy", np.dtype("<i8")) as offsets_file,
    ):
        offsets_file.append(np.zeros(1))
        for batch in _batches(iter_documents(source)):
            tokens, lengths = tokenizer.encode([document.text for document in batch])
            tokens_file.append(tokens)
            offsets_file.append(num_tokens + np.cumsum(lengths))
            num_tokens += len(tokens)
            num_documents += len(batch)
    if num_documents == 0:
        raise UserError(
            f'data.source = "{source.kind}" is empty: no document in its {counted(len(source.files), "file")} under '
            f"{source.root}"
        )
    meta = {
        "format": "bytescale-tokens",
        "version": FORMAT_VERSION,
        "source": source.kind,
        "tokenizer": tokenizer.name,
        "end_id": tokenizer.end_id,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "size_bytes": {name: (directory / name).stat().st_size for name in ("tokens.npy", "offsets.npy")},
    }
    with open(directory / "meta.json", "w") as file:
        json.dump(meta, file, indent=1)
        _sync(file)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups worth one call of the tokenizer."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


class _NpyWriter:
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

    def __enter__(self) -> "_NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()
                assert self._file.tell() == self._data_begin
                _sync(self._file)
