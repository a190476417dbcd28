"""Where every tensor of a checkpoint lies: name -> type, shape, and the boxes that files hold of it.

JSON: {name: {"dtype": "F32", "shape": [97, 32], "parts": [[file, key, offset, shape], ...]}}, where `key` is the name
inside the safetensors file. Invariant: the boxes of a tensor lie inside it and have its number of elements together.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bytescale.checkpoint.slices import Slice
from bytescale.checkpoint.weights_file import DTYPE_NAMES
from bytescale.errors import UserError

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Part:
    """A box of a tensor: where it is stored, and where it lies in the whole."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, stored in `parts`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


Index = Mapping[str, StoredTensor]
"""Name of the whole tensor -> where it lies."""


def file_index(file: str, slices: Iterable[Slice]) -> tuple[dict[str, torch.Tensor], Index]:
    """What one rank stores in `file`: the tensors by their keys there, and the index of them."""
    tensors: dict[str, torch.Tensor] = {}
    index: dict[str, StoredTensor] = {}
    for piece in slices:
        if piece.is_written:
            before = index[piece.name].parts if piece.name in index else ()
            key = f"{piece.name}#{len(before)}" if before else piece.name
            tensors[key] = piece.tensor
            part = Part(file, key, piece.offset, tuple(piece.tensor.shape))
            index[piece.name] = StoredTensor(piece.tensor.dtype, piece.shape, (*before, part))
    return tensors, index


def merge(indices: Iterable[Index]) -> Index:
    """The index of all ranks' files."""
    parts: dict[str, list[Part]] = {}
    known: dict[str, StoredTensor] = {}
    for index in indices:
        for name, tensor in index.items():
            parts.setdefault(name, []).extend(tensor.parts)
            known[name] = tensor
    return {name: StoredTensor(t.dtype, t.shape, tuple(parts[name])) for name, t in known.items()}


def write_index(index: Index) -> str:
    """`index` as JSON."""
    return json.dumps(
        {
            name: {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "parts": [[p.file, p.key, p.offset, p.shape] for p in tensor.parts],
            }
            for name, tensor in index.items()
        },
        separators=(",", ":"),
    )


def read_index(text: bytes, source: str) -> Index:
    """What `write_index` wrote.

    Raises:
        UserError: it is not an index, or a tensor is not covered by its parts; names `source`.
    """
    try:
        index = parse_index(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{source} is not the index of a checkpoint: {type(error).__name__}: {error}") from None
    check_index(index, source)
    return index


def parse_index(text: bytes) -> Index:
    """What `write_index` wrote, of one file or of all."""
    return {name: _stored(entry) for name, entry in json.loads(text).items()}


def check_index(index: Index, source: str) -> None:
    """Whether the parts of every tensor make the whole.

    Raises:
        UserError: they do not; names `source`.
    """
    for name, tensor in index.items():
        inside = all(
            len(part.offset) == len(part.shape) == len(tensor.shape)
            and all(
                begin >= 0 and begin + size <= whole
                for begin, size, whole in zip(part.offset, part.shape, tensor.shape, strict=True)
            )
            for part in tensor.parts
        )
        if not inside or sum(math.prod(part.shape) for part in tensor.parts) != math.prod(tensor.shape):
            raise UserError(f"{source}: the parts of {name} do not make the whole of shape {tensor.shape}")


def _stored(entry: Any) -> StoredTensor:
    parts = tuple(Part(str(file), str(key), tuple(o), tuple(s)) for file, key, o, s in entry["parts"])
    return StoredTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), parts)
