"""The directory of a run's checkpoints: names, the manifest that makes one whole, publication, pruning.

A checkpoint is a directory `step-000123`. It is filled as `.step-000123.new`, every file brought to the disk, and
published by one rename; one that is to go is renamed to `.step-000123.old` first. So a name without a dot is whole or
damaged by others, never half-written, whatever was killed when; what begins with a dot is a leftover.

`manifest.json` holds name, size and checksum of every other file. Needs no torch. Cost: two waits for the disk a file;
proving a checkpoint reads it once.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale.errors import UserError
from bytescale.files import exchange, file_digest, sync, write_text_atomically

FORMAT, VERSION = "bytescale-checkpoint", 1
MANIFEST, STATE, INDEX = "manifest.json", "state.json", "index.json"

_PUBLISHED = re.compile(r"step-(\d{6,18})")
_LEFTOVER = re.compile(r"\.step-\d{6,18}\.(new|old)")


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file."""

    size: int
    digest: str


Manifest = Mapping[str, FileFacts]
"""Name of a file in the checkpoint -> what it must be."""


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` is published."""
    return directory / f"step-{step:06d}"


def unpublished_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` is filled."""
    return directory / f".step-{step:06d}.new"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _PUBLISHED.fullmatch(path.name)
    return int(match[1]) if match else 0


def find_checkpoints(directory: Path) -> list[Path]:
    """What is published in `directory`, newest first."""
    try:
        found = [path for path in directory.iterdir() if _PUBLISHED.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of, reverse=True)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Complete the checkpoint in `directory`, whose files are on the disk."""
    files = {name: [facts.size, facts.digest] for name, facts in sorted(manifest.items())}
    value = {"format": FORMAT, "version": VERSION, "files": files}
    write_text_atomically(directory / MANIFEST, json.dumps(value, indent=1) + "\n")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint `path`.

    Raises:
        UserError: there is none, it is damaged, or it is of a newer version of this program.
    """
    try:
        value: Any = json.loads((path / MANIFEST).read_bytes())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}")
        version = int(value["version"])
        files = {str(name): FileFacts(int(size), str(digest)) for name, (size, digest) in value["files"].items()}
    except FileNotFoundError:
        raise UserError(f"{path} is not a checkpoint: it holds no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    if version != VERSION:
        raise UserError(f"{path} has version {version} of the format, this program reads version {VERSION}; update it")
    for name in (STATE, INDEX, *files):
        if name not in files or Path(name).name != name:
            raise UserError(f"{path / MANIFEST} is damaged: it does not list {name} as a file of the checkpoint")
    return files


def damage(path: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first of the files `names` that is not as the manifest has it, in words; None where all are."""
    for name in names:
        file, facts = path / name, manifest[name]
        try:
            size = file.stat().st_size
            if size != facts.size:
                return f"{file} has {size:,} bytes instead of {facts.size:,}"
            if file_digest(file) != facts.digest:
                return f"{file} is damaged: its checksum differs from the manifest's"
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
    return None


def publish(unpublished: Path, target: Path) -> None:
    """Give a complete checkpoint its name; an earlier one of that name makes place for it."""
    sync(unpublished)
    if target.exists() and exchange(unpublished, target):
        shutil.rmtree(unpublished, ignore_errors=True)
    else:
        remove_checkpoint(target)
        os.rename(unpublished, target)
    sync(target.parent)


def remove_checkpoint(path: Path) -> None:
    """Take a published checkpoint away; nobody sees half of it."""
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        shutil.rmtree(old, ignore_errors=True)


def prune(directory: Path, keep: int) -> None:
    """Leave the `keep` newest checkpoints."""
    for path in find_checkpoints(directory)[keep:]:
        remove_checkpoint(path)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed runs left unpublished; no other run may be writing in `directory`."""
    try:
        leftovers = [path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name)]
    except FileNotFoundError:
        return
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
