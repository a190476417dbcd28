"""The disk tier: activations in a nameless file, on any machine.

`pwrite` takes bytes from the storage itself and `pread` puts them into the new one, without staging buffers; neither
counts as resident memory. The file never has a name (or loses it right after opening), so nothing is left of it after
any end of the process, kill -9 included. Its room is allocated before bytes are handed over, so a full disk shows when
room is asked for. One thread writes, one reads.

Invariant: memory falls by what left, because freed blocks go back to the operating system (`release_freed_memory`).
Cost: copies to and from the page cache on two threads; the disk itself only when the cache is full.
"""

import contextlib
import ctypes
import os
import tempfile
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bytescale.arrays import ceil_div
from bytescale.errors import UserError
from bytescale.runtime.clock import HostMarker, Marker
from bytescale.runtime.offload.tiers import Copy, Direction, OffloadError, Partition, Range, Stash

Bytes = npt.NDArray[np.uint8]

_PAGE = 4096
_GROWTH_BYTES = 64 << 20
"""Room is allocated in pieces of at least this size."""

RELEASED_BYTES = 1 << 20
"""Freed blocks of at least this size go back to the operating system at once, see `release_freed_memory`."""

_LARGEST_THRESHOLD = 32 << 20
"""Where glibc's own adjustment of the threshold ends."""


def release_freed_memory() -> None:
    """From now on give freed blocks of `RELEASED_BYTES` back to the operating system (glibc; elsewhere nothing).

    glibc keeps what is freed for reuse, so that resident memory would stay at its peak however much has left. The price
    is that such blocks are zeroed by the kernel whenever they are allocated again (measured: 16-20 % of compute time),
    hence only in steps that offload; `keep_freed_memory` ends it.
    """
    _set_allocator(mmap_threshold=RELEASED_BYTES)


def keep_freed_memory() -> None:
    """From now on reuse freed blocks, as glibc does by itself after a while; what is free now is given back once."""
    _set_allocator(mmap_threshold=_LARGEST_THRESHOLD, trim_threshold=2 * _LARGEST_THRESHOLD)


def _set_allocator(**thresholds: int) -> None:
    numbers = {"trim_threshold": -1, "mmap_threshold": -3}  # of glibc's malloc.h
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        for name, value in thresholds.items():
            libc.mallopt(numbers[name], value)
        libc.malloc_trim(0)


class _Room:
    """Which parts of the file are free: first fit, so that pages written before are written again.

    Room is given back by finalizers too, which may run inside any statement, `take` included. So `give_back` takes no
    lock and changes nothing but a queue, which the next `take` empties.
    """

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self._descriptor, self._limit_bytes = descriptor, limit_bytes
        self._free: list[Range] = []
        self._returned: deque[Range] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int | None:
        """Offset of `num_bytes` of allocated file; None when limit or disk do not allow that."""
        num_bytes = _whole_pages(num_bytes)
        with self._lock:
            self._take_returned()
            found = self._first_fit(num_bytes)
            if found is None and self._grow(num_bytes):
                found = self._first_fit(num_bytes)
            return found

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return room that `take` gave; safe inside a finalizer."""
        self._returned.append((offset, offset + _whole_pages(num_bytes)))

    def _take_returned(self) -> None:
        while self._returned:
            self._insert(self._returned.popleft())

    def _insert(self, part: Range) -> None:
        insort(self._free, part)
        merged: list[Range] = []
        for begin, end in self._free:
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged

    def _first_fit(self, num_bytes: int) -> int | None:
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                self._free[i : i + 1] = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                return begin
        return None

    def _grow(self, num_bytes: int) -> bool:
        """Allocate more of the file: a large piece, or near the limit just what is missing."""
        tail = self._free[-1] if self._free and self._free[-1][1] == self._size else (self._size, self._size)
        missing = num_bytes - (tail[1] - tail[0])
        for growth in sorted({max(missing, _GROWTH_BYTES), missing}, reverse=True):
            if self._size + growth > self._limit_bytes:
                continue
            try:
                os.posix_fallocate(self._descriptor, self._size, growth)
            except OSError:
                continue
            self._insert((self._size, self._size + growth))
            self._size += growth
            return True
        return False


def _whole_pages(num_bytes: int) -> int:
    return ceil_div(num_bytes, _PAGE) * _PAGE


class DiskTier:
    """A nameless file in `directory` of at most `limit_bytes`, a thread that writes it and one that reads it."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """Open the file.

        Raises:
            UserError: the directory is missing or cannot be written.
        """
        self._descriptor = open_nameless(directory)
        self._room = _Room(self._descriptor, limit_bytes)
        self._out = ThreadPoolExecutor(1, "offload-out")
        self._in = ThreadPoolExecutor(1, "offload-in")
        self._copies: list[Copy] = []
        self._jobs: list[Future[None]] = []
        self._engaged = False
        self.clock: Marker = HostMarker()

    def begin_step(self) -> None:
        self._copies, self._jobs = [], []

    def engage(self) -> None:
        if not self._engaged:
            self._engaged = True
            release_freed_memory()

    def store(self, source: Tensor, partition: Partition) -> Stash | None:
        offset = self._room.take(partition.leaving_bytes)
        return None if offset is None else _DiskStash(self, source, partition, offset)

    def end_step(self) -> None:
        self._wait()
        if self._engaged:
            self._engaged = False
            keep_freed_memory()

    def copies(self) -> list[Copy]:
        self._wait()
        return list(self._copies)

    def _wait(self) -> None:
        for job in self._jobs:
            job.exception()
        self._jobs = []

    def close(self) -> None:
        self._out.shutdown()
        self._in.shutdown()
        os.close(self._descriptor)

    def submit(self, direction: Direction, move: Callable[[], None], num_bytes: int) -> Future[None]:
        """Run `move` on the thread of `direction` and count it."""

        def job() -> None:
            begin_s = time.perf_counter()
            move()
            self._copies.append(Copy(direction, begin_s, time.perf_counter() - begin_s, num_bytes))

        future = (self._out if direction == "out" else self._in).submit(job)
        self._jobs.append(future)
        return future

    def write(self, source: Bytes, ranges: tuple[Range, ...], offset: int) -> None:
        for begin, end in ranges:
            view = source[begin:end].data
            while len(view):
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def read(self, target: Bytes, ranges: tuple[Range, ...], offset: int) -> None:
        for begin, end in ranges:
            view = target[begin:end].data
            while len(view):
                num_read = os.preadv(self._descriptor, [view], offset)
                if not num_read:
                    raise OSError("the offload file ends early")
                view, offset = view[num_read:], offset + num_read

    def give_back(self, offset: int, num_bytes: int) -> None:
        self._room.give_back(offset, num_bytes)


def check_directory(directory: Path) -> None:
    """Make `directory` and prove that the offload file can be opened there.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"offload.dir = {directory} cannot be made: {error.strerror}") from None
    os.close(open_nameless(directory))


def open_nameless(directory: Path) -> int:
    """A file in `directory` that no directory lists, open for reading and writing.

    Raises:
        UserError: the directory is missing or cannot be written.
    """
    try:
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):  # not every file system knows it
                return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        descriptor, name = tempfile.mkstemp(prefix=".offload-", dir=directory)
        os.unlink(name)
        return descriptor
    except OSError as error:
        raise UserError(f"offload.dir = {directory} cannot be written: {error.strerror}") from None


class _DiskStash:
    def __init__(self, tier: DiskTier, source: Tensor, partition: Partition, offset: int) -> None:
        self._tier, self._partition, self._offset = tier, partition, offset
        self._num_bytes = source.numel()
        self._kept: Bytes | None = None
        self._target: Tensor | None = None
        self._reading: Future[None] | None = None
        self._has_room = True
        view = source.numpy()

        def move() -> None:
            tier.write(view, partition.leaving, offset)
            self._kept = _gathered(view, partition.staying)

        self._writing = tier.submit("out", move, partition.leaving_bytes)

    def settle(self) -> bool:
        failed = self._writing.exception() is not None
        # The job's closure holds the storage; only its result is of interest from here on.
        self._writing = Future()
        self._writing.set_result(None)
        return not failed

    def recall(self) -> None:
        if self._reading is not None:
            return
        target = torch.empty(self._num_bytes, dtype=torch.uint8)
        view, partition = target.numpy(), self._partition

        def move() -> None:
            self._tier.read(view, partition.leaving, self._offset)
            if self._kept is not None:
                _scatter(self._kept, view, partition.staying)
                self._kept = None
            self._give_back()

        self._target = target
        self._reading = self._tier.submit("in", move, partition.leaving_bytes)

    def take(self) -> Tensor:
        self.recall()
        assert self._reading is not None and self._target is not None
        error = self._reading.exception()
        if error is not None:
            raise OffloadError(f"offloaded activations cannot be read back: {error}") from error
        target, self._target = self._target, None
        return target

    def discard(self) -> None:
        if self._reading is None:
            self._give_back()

    def _give_back(self) -> None:
        if self._has_room:
            self._has_room = False
            self._tier.give_back(self._offset, self._partition.leaving_bytes)


def _gathered(view: Bytes, ranges: tuple[Range, ...]) -> Bytes | None:
    """The ranges in storage of their own; None without ranges."""
    if not ranges:
        return None
    return np.concatenate([view[begin:end] for begin, end in ranges])


def _scatter(packed: Bytes, view: Bytes, ranges: tuple[Range, ...]) -> None:
    done = 0
    for begin, end in ranges:
        view[begin:end] = packed[done : done + end - begin]
        done += end - begin
