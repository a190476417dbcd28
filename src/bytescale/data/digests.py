"""Digests of file contents, each file read once per machine: a manifest remembers those of unchanged files.

An entry of the manifest is believed while size, times, and inode of the file are those at which it was read, and the
file had then been at rest for longer than a tick of the coarsest file system clock: a file that is written in the same
tick as it is read would keep its times. There is a manifest for every root; it is a cache and may be deleted.

Cost: one system call a file; files that are new or changed are read whole, by one process while others wait for it.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bytescale.data.sources.raw import unreadable
from bytescale.files import file_digest, write_text_atomically
from bytescale.locks import locked

TICK_NS = 2_000_000_000
"""Coarsest step of modification times: two seconds, on FAT."""

MAX_STATES = 4
"""States of one path that are remembered, since machines that share a cache may each have a file of that name."""

_State = tuple[int, int, int, int]


class _Entry(NamedTuple):
    """A file's state when it was read; `read_ns` is the time before its first byte."""

    state: _State
    read_ns: int
    digest: str


_Known = dict[str, list[_Entry]]


def manifest_path(cache_dir: Path, root: Path) -> Path:
    """The manifest of the files below `root`."""
    return cache_dir / f"digests-{hashlib.blake2b(os.path.abspath(root).encode(), digest_size=10).hexdigest()}.json"


def file_digests(paths: Sequence[Path], manifest: Path | None = None) -> list[str]:
    """Hexadecimal digest of the contents of each file.

    Args:
        paths: the files.
        manifest: file of digests known before; what is read is added to it. None, or one that is broken, reads all.

    Raises:
        UserError: a file cannot be read.
    """
    if manifest is None:
        return [_add({}, path) for path in paths]
    states = [_state(path) for path in paths]
    known = _read(manifest)
    digests = [_remembered(known, path, state) for path, state in zip(paths, states, strict=True)]
    if not all(digests):
        with locked(manifest.with_suffix(".lock"), "read the data"):
            # Another process may have read them while this one waited.
            known = _read(manifest)
            digests = [
                _remembered(known, path, state) or _add(known, path) for path, state in zip(paths, states, strict=True)
            ]
            with suppress(OSError):
                write_text_atomically(manifest, json.dumps(known))
    return digests


def _add(known: _Known, path: Path) -> str:
    """Read the file, which may have changed in the meantime, and record it."""
    state, read_ns = _state(path), time.time_ns()
    try:
        digest = file_digest(path)
    except OSError as error:
        raise unreadable(path, error) from error
    others = [entry for entry in known.get(str(path), []) if entry.state != state]
    known[str(path)] = [_Entry(state, read_ns, digest), *others][:MAX_STATES]
    return digest


def _state(path: Path) -> _State:
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _remembered(known: _Known, path: Path, state: _State) -> str:
    """The digest of the file in this state; empty where it is unknown, or a change of it could have been missed."""
    for entry in known.get(str(path), []):
        if entry.state == state and entry.read_ns - state[1] > TICK_NS:
            return entry.digest
    return ""


def _read(manifest: Path) -> _Known:
    """The entries of the manifest; empty if it is missing or not a manifest."""
    try:
        return {
            path: [_entry(*kept) for kept in entries] for path, entries in json.loads(manifest.read_bytes()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _entry(state: list[int], read_ns: int, digest: str) -> _Entry:
    size, mtime_ns, ctime_ns, inode = map(int, state)
    return _Entry((size, mtime_ns, ctime_ns, inode), int(read_ns), bytes.fromhex(digest).hex())
