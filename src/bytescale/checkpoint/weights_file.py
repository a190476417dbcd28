"""Safetensors files written one tensor at a time: names, types and shapes first, then the data in any order.

Format: 8 bytes with the length of the header, the header as JSON (name -> dtype, shape, data_offsets), the data. The
header comes from shapes alone, so no more than one tensor is in memory while a file of any size is written. Tensors
that are all there are written in one pass, which copies nothing and takes the checksum on the way.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bytescale.errors import RunError
from bytescale.files import DIGEST_BYTES

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

TensorSpec = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, type and shape."""


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor that `spec` describes."""
    return spec[1].itemsize * prod(spec[2])


def split_by_size(specs: Iterable[TensorSpec], limit_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive `specs` in lists of at most `limit_bytes`; a larger tensor has a list of its own."""
    parts: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = num_bytes(spec)
        if not parts or size > room:
            parts.append([])
            room = limit_bytes
        parts[-1].append(spec)
        room -= size
    return parts


@dataclass(frozen=True)
class _Layout:
    """Where every tensor of a file begins, after the header."""

    header: bytes
    begins: dict[str, int]


def _layout(specs: Iterable[TensorSpec]) -> _Layout:
    # Wide types first: every tensor then begins at a multiple of its element.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec[1].itemsize):
        name, dtype, shape = spec
        begins[name], end = end, end + num_bytes(spec)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _Layout(len(text).to_bytes(8, "little") + text, begins)


def _data(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a file of `tensors` and bring it to the disk.

    Returns:
        Its checksum, as `bytescale.files.file_digest` gives it.

    Raises:
        OSError: it could not be written.
    """
    layout = _layout((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    hasher = hashlib.blake2b(layout.header, digest_size=DIGEST_BYTES)
    with open(path, "wb") as file:
        file.write(layout.header)
        for name in layout.begins:
            data = _data(tensors[name])
            file.write(data)
            hasher.update(data)
        file.flush()
        os.fsync(file.fileno())
    return hasher.hexdigest()


class WeightsFile:
    """One file that is to hold the tensors of `specs`. A context manager; every tensor must be put before it ends."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self._missing = {spec[0]: spec for spec in specs}
        self._layout = _layout(self._missing.values())
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(self._layout.header)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write the tensor `name`, which must have the type and shape that were announced."""
        _, dtype, shape = self._missing.pop(name)
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise RunError(
                f"cannot write {self._path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, not as announced"
            )
        self._file.seek(len(self._layout.header) + self._layout.begins[name])
        self._file.write(_data(tensor))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                if self._missing:
                    raise RunError(f"cannot write {self._path}: {min(self._missing)} never came")
                self._file.flush()
                os.fsync(self._file.fileno())
