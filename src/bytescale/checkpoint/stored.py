"""A checkpoint on the disk, read: the values it holds, where its tensors lie, and whether it is sound.

Reading one looks at the small files alone, which are proven by their checksums; the tensors' files are proven by
`damage`, which every rank calls for a share of them. Nothing in a checkpoint is executed: values are JSON, tensors
safetensors.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale.checkpoint.directory import INDEX, STATE, Manifest, damage, read_manifest
from bytescale.checkpoint.index import Index, read_index
from bytescale.checkpoint.reader import TensorReader
from bytescale.errors import UserError


@dataclass(frozen=True)
class StoredCheckpoint:
    """What `read_checkpoint` found.

    Attributes:
        path: the directory.
        values: what the run stored besides tensors; `step` among it.
        index: where the tensors lie: parameters by the names of the Hugging Face model, states of the optimizer as
            `optimizer/KEY/NAME`.
        manifest: the files.
    """

    path: Path
    values: dict[str, Any]
    index: Index
    manifest: Manifest

    def tensors(self) -> TensorReader:
        """Reads tensors, or boxes of them; a context manager."""
        return TensorReader(self.path, self.index)

    def damage(self, rank: int = 0, size: int = 1) -> str | None:
        """What is wrong with this rank's share of the files, in words; None where nothing is."""
        return damage(self.path, self.manifest, sorted(self.manifest)[rank::size])


def read_checkpoint(path: Path) -> StoredCheckpoint:
    """The checkpoint in `path`; files of tensors are not looked at.

    Raises:
        UserError: it is not one, is damaged, or of a newer version.
    """
    manifest = read_manifest(path)
    if (problem := damage(path, manifest, (STATE, INDEX))) is not None:
        raise UserError(problem)
    values = json.loads((path / STATE).read_bytes())
    index = read_index((path / INDEX).read_bytes(), str(path / INDEX))
    missing = {part.file for tensor in index.values() for part in tensor.parts} - set(manifest)
    if missing:
        raise UserError(f"{path}: the manifest does not list {min(missing)}, which holds tensors")
    return StoredCheckpoint(path, values, index, manifest)
