"""Reads any box of any tensor from files that hold it in other boxes.

Only the bytes that a rank asks for are read: files are mapped, and of a stored box the part that overlaps is copied
once, to where it belongs. Cost: one open file for every file that holds something of this rank.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from bytescale.checkpoint.index import Index, Part, StoredTensor
from bytescale.checkpoint.slices import Slice
from bytescale.errors import UserError


class TensorReader:
    """The tensors of `index`, whose files lie in `directory`. A context manager."""

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self._index = directory, index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def whole(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU.

        Raises:
            UserError: it is not there, or a file is damaged.
        """
        stored = self._stored(name)
        result = torch.empty(stored.shape, dtype=stored.dtype)
        self._fill(stored, (0,) * result.ndim, result)
        return result

    def load(self, slices: Iterable[Slice]) -> None:
        """Fill the memory of `slices`, whatever their boxes.

        Raises:
            UserError: a tensor is not there or has another shape, or a file is damaged.
        """
        for piece in slices:
            stored = self._stored(piece.name)
            if stored.shape != piece.shape:
                found, wanted = stored.shape, piece.shape
                raise UserError(f"{self._directory} holds {piece.name} of shape {found}, the model has {wanted}")
            self._fill(stored, piece.offset, piece.tensor)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._index:
            raise UserError(f"{self._directory} does not hold {name}; it is of another model")
        return self._index[name]

    def _fill(self, stored: StoredTensor, offset: tuple[int, ...], into: torch.Tensor) -> None:
        for part in stored.parts:
            both = [
                (max(b, o), min(b + n, o + size))
                for b, n, o, size in zip(part.offset, part.shape, offset, into.shape, strict=True)
            ]
            if all(begin < end for begin, end in both):
                there = tuple(slice(begin - o, end - o) for (begin, end), o in zip(both, part.offset, strict=True))
                here = tuple(slice(begin - o, end - o) for (begin, end), o in zip(both, offset, strict=True))
                into[here].copy_(self._read(part, there))

    def _read(self, part: Part, box: tuple[slice, ...]) -> torch.Tensor:
        try:
            if part.file not in self._files:
                self._files[part.file] = self._stack.enter_context(safe_open(self._directory / part.file, "pt"))
            file = self._files[part.file]
            # A number has no slices.
            tensor: torch.Tensor = file.get_slice(part.key)[box] if box else file.get_tensor(part.key)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._directory / part.file} cannot be read: {error}") from None
        return tensor
