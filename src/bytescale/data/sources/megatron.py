r"""Megatron-LM's indexed datasets: tokens in a `.bin` file, an index of them in the `.idx` file beside it.

The index, little-endian: `MMIDIDX\0\0`, version 1 (uint64), a code of the token type (uint8), numbers of sequences
and of document boundaries (uint64 each); then lengths of the sequences (int32), their places in bytes (int64), and
the boundaries (int64): document i is the sequences boundaries[i]..boundaries[i+1]-1. Tokens are taken as they stand,
end tokens included. Invariant: an index that does not fit its data is refused before a token is read.

Cost: the index is read; tokens are mapped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale.arrays import IntArray
from bytescale.data.sources.chunks import Chunk, Limits, Position
from bytescale.data.sources.content import Document, TokenIds
from bytescale.errors import UserError

_MAGIC = b"MMIDIDX\0\0"
_HEADER_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True, eq=False)
class _Index:
    """Where documents lie: `lengths` in tokens and `places` in bytes of each sequence, `boundaries` of documents."""

    dtype: np.dtype[np.generic]
    lengths: IntArray
    places: IntArray
    boundaries: IntArray


def indexed_chunks(path: Path, begin: Position, limits: Limits) -> Iterator[Chunk]:
    """The documents of an indexed dataset from `begin` on.

    Raises:
        UserError: the index is damaged or does not fit its data.
        OSError: a file cannot be read.
    """
    index = _read_index(path)
    sizes = np.concatenate([[0], np.cumsum(index.lengths)])[index.boundaries] * index.dtype.itemsize
    first, last = begin.record, len(index.boundaries) - 1
    while first < last:
        end = int(np.searchsorted(sizes, sizes[first] + limits.num_bytes, side="left"))
        end = min(max(end, first + 1), first + limits.num_records, last)
        yield Chunk(Position(begin.file, first), Position(begin.file, end))
        first = end


def indexed_documents(chunk: Chunk, path: Path, name: str) -> Iterator[Document | UserError]:
    """The documents of a chunk; an error in place of one with an id below 0."""
    index = _read_index(path)
    tokens = np.memmap(_data_of(path), dtype=np.uint8, mode="r") if index.lengths.sum() else np.zeros(0, np.uint8)
    for number in range(chunk.begin.record, chunk.end.record):
        sequences = range(int(index.boundaries[number]), int(index.boundaries[number + 1]))
        parts = [_tokens(tokens, index, sequence) for sequence in sequences]
        ids = np.concatenate(parts) if parts else np.zeros(0, index.dtype)
        # Below 0 there is no token; the types are no wider than what a token may be but for int64.
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32):
            yield UserError(f"{_data_of(path)}: document {number} holds {ids.min()}, which is no token")
        else:
            yield Document(f"{name}:{number}", TokenIds(ids.astype(np.uint32)))


def _tokens(data: np.ndarray, index: _Index, sequence: int) -> np.ndarray:
    begin = int(index.places[sequence])
    return data[begin : begin + int(index.lengths[sequence]) * index.dtype.itemsize].view(index.dtype)


def _data_of(path: Path) -> Path:
    return path.with_suffix(".bin")


def _read_index(path: Path) -> _Index:
    raw = path.read_bytes()
    if not raw.startswith(_MAGIC):
        older = "; it is of the older TNTIDX format, write it again" if raw.startswith(b"TNTIDX") else ""
        raise UserError(f"{path} is not the index of a Megatron dataset{older}")
    if len(raw) < _HEADER_BYTES:
        raise UserError(f"{path} is cut short: {len(raw)} bytes hold no header")
    version, code = int(np.frombuffer(raw, "<u8", 1, 9)[0]), raw[17]
    num_sequences, num_boundaries = (int(n) for n in np.frombuffer(raw, "<u8", 2, 18))
    if version != 1 or code not in _TYPES:
        what = f"version {version}" if version != 1 else f"tokens of type code {code}"
        raise UserError(f"{path} has {what}, which is not known; known: version 1, integers")
    needed = _HEADER_BYTES + 12 * num_sequences + 8 * num_boundaries
    if len(raw) < needed:
        raise UserError(f"{path} is cut short: {len(raw)} bytes, its {num_sequences} sequences need {needed}")
    at = _HEADER_BYTES
    lengths = np.frombuffer(raw, "<i4", num_sequences, at).astype(np.int64)
    places = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
    boundaries = np.frombuffer(raw, "<i8", num_boundaries, at + 12 * num_sequences)
    index = _Index(np.dtype(_TYPES[code]), lengths, places, boundaries)
    _check(index, path)
    return index


def _check(index: _Index, path: Path) -> None:
    """Whether every sequence lies in the data, and every document in the sequences."""
    size, boundaries = _data_of(path).stat().st_size, index.boundaries
    bad_length = (index.lengths < 0) | (index.places < 0)
    beyond = np.flatnonzero(bad_length | (index.places + index.lengths * index.dtype.itemsize > size))
    if len(beyond):
        i = int(beyond[0])
        raise UserError(
            f"{path} does not fit its data: sequence {i} has {index.lengths[i]} tokens at byte {index.places[i]}, "
            f"{_data_of(path).name} has {size} bytes"
        )
    if len(boundaries) and (
        boundaries[0] != 0 or boundaries[-1] != len(index.lengths) or (np.diff(boundaries) < 0).any()
    ):
        raise UserError(f"{path} does not fit itself: its documents are not all of its {len(index.lengths)} sequences")
