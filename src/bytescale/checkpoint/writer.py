"""Writes the checkpoints of a run: every rank its own file, rank 0 the rest, while training goes on.

`save` copies this rank's slices to host memory, in buffers that are used again, and returns; a thread writes them. The
ranks agree through the store where they met, never by a collective, so nothing here can come between the collectives
of a step: each leaves a report under a key of its own, rank 0 waits for all of them, for a bounded time, and publishes.
A failed write costs that checkpoint alone.

    rank r: rank-0000r.safetensors -> report         rank 0: reports -> index, state, manifest -> rename -> prune

Invariant: one save at a time; a second one waits for the first, for half of the bound at most, and is then left out.
Cost: a step waits for the copy; host memory of a rank's states once more; the index of a rank travels once, not at
every save.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from bytescale.checkpoint.directory import (
    INDEX,
    STATE,
    FileFacts,
    checkpoint_path,
    prune,
    publish,
    unpublished_path,
    write_manifest,
)
from bytescale.checkpoint.index import Index, check_index, file_index, merge, parse_index, write_index
from bytescale.checkpoint.slices import Slice
from bytescale.checkpoint.weights_file import write_tensors
from bytescale.files import file_digest, write_text_atomically


@dataclass(frozen=True)
class Saved:
    """The end of a save, as rank 0 knows it.

    Attributes:
        step: the step after which it was taken.
        failure: why there is no checkpoint, in words; None where there is.
        duration_s: from the call to the publication.
    """

    step: int
    failure: str | None
    duration_s: float


class CheckpointWriter:
    """The checkpoints of one run, seen from one of its ranks."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        size: int,
        store: Store,
        *,
        keep: int,
        timeout_s: float,
        in_background: bool = True,
    ) -> None:
        """Nothing is written yet.

        Args:
            directory: of the checkpoints; made by the first save.
            rank, size: of the world.
            store: a connection of its own to where the ranks meet, with a prefix of its own.
            keep: newest checkpoints that stay.
            timeout_s: how long rank 0 waits for the reports of the others, and twice how long a save waits for the one
                before it: other ranks are kept waiting meanwhile.
            in_background: whether `save` returns after the copy.
        """
        self.directory = directory
        self._rank, self._size, self._store = rank, size, store
        self._keep, self._timeout_s, self._in_background = keep, timeout_s, in_background
        self._staged: dict[str, torch.Tensor] = {}
        self._indices: dict[int, tuple[str, Index]] = {}
        self._told = ""
        self._number = 0
        self._thread: threading.Thread | None = None
        self._ended: list[Saved] = []

    def save(
        self, step: int, slices: Sequence[Slice], values: Mapping[str, Any], before: Callable[[], None] = lambda: None
    ) -> float:
        """Begin to write what `slices` hold now; every rank calls it after the same steps.

        Args:
            step: the step that has ended.
            slices: of this rank.
            values: what else is to be known, JSON; rank 0's are stored.
            before: called on rank 0 before the publication.

        Returns:
            Seconds that the call took.
        """
        begin_s = time.perf_counter()
        is_free = self.wait()
        self._number += 1
        if not is_free:
            self._leave_out(step, begin_s)
            return time.perf_counter() - begin_s
        tensors, index = file_index(f"rank-{self._rank:05d}.safetensors", slices)
        text = json.dumps(values)
        if self._in_background:
            tensors = self._stage(tensors)
        work = partial(self._write, self._number, step, tensors, index, text, before, begin_s)
        if self._in_background:
            # A daemon: a disk that hangs must not keep a failed process alive.
            self._thread = threading.Thread(target=work, name="bytescale-checkpoint", daemon=True)
            self._thread.start()
        else:
            work()
        return time.perf_counter() - begin_s

    def wait(self) -> bool:
        """Until this rank has nothing to write any more, but not for long; whether that has come."""
        if self._thread is not None:
            self._thread.join(self._timeout_s / 2)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _leave_out(self, step: int, begin_s: float) -> None:
        """Do without this checkpoint, since the disk has not yet taken the one before."""
        failure = f"the checkpoint before it is still being written after {self._timeout_s / 2:.0f} s"
        if self._rank == 0:
            self._ended.append(Saved(step, failure, time.perf_counter() - begin_s))
        else:
            self._store.set(f"report {self._number} {self._rank}", json.dumps({"failure": failure}))

    def ended(self) -> list[Saved]:
        """Saves that have ended since the last call; empty on other ranks than 0."""
        found, self._ended = self._ended, []
        return found

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy in host memory."""
        staged: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            buffer = self._staged.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            staged[key] = buffer.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._staged = staged
        return staged

    def _write(
        self,
        number: int,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        index: Index,
        values: str,
        before: Callable[[], None],
        begin_s: float,
    ) -> None:
        """The thread: this rank's file and report; on rank 0 also the rest."""
        unpublished = unpublished_path(self.directory, step)
        name = f"rank-{self._rank:05d}.safetensors"
        try:
            unpublished.mkdir(parents=True, exist_ok=True)
            digest = write_tensors(unpublished / name, tensors)
            report: dict[str, Any] = {"size": (unpublished / name).stat().st_size, "digest": digest}
        except Exception as error:
            report = {"failure": in_words(error, unpublished / name)}
        try:
            self._report(number, report, index)
            failure = self._complete(number, step, unpublished, values, before) if self._rank == 0 else None
        except Exception as error:
            failure = in_words(error, unpublished)
        if self._rank == 0:
            if failure is not None:
                shutil.rmtree(unpublished, ignore_errors=True)
            self._ended.append(Saved(step, failure, time.perf_counter() - begin_s))

    def _report(self, number: int, report: dict[str, Any], index: Index) -> None:
        """Tell rank 0 what was written, and once what lies where."""
        text = write_index(index)
        report["index"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if report["index"] != self._told:
            self._store.set(f"index {self._rank} {report['index']}", text)
            self._told = report["index"]
        self._store.set(f"report {number} {self._rank}", json.dumps(report))

    def _complete(
        self, number: int, step: int, unpublished: Path, values: str, before: Callable[[], None]
    ) -> str | None:
        """Wait for all ranks, then publish; why that cannot be, in words."""
        deadline_s = time.monotonic() + self._timeout_s
        reports = []
        for rank in range(self._size):
            left = timedelta(seconds=max(0.1, deadline_s - time.monotonic()))
            try:
                self._store.wait([f"report {number} {rank}"], left)
            except RuntimeError:
                return f"rank {rank} has not written its part within {self._timeout_s:.0f} s"
            reports.append(json.loads(self._store.get(f"report {number} {rank}")))
            self._store.delete_key(f"report {number} {rank}")
        for rank, report in enumerate(reports):
            if "failure" in report:
                return f"rank {rank}: {report['failure']}" if self._size > 1 else str(report["failure"])
            self._keep_index(rank, report["index"])
        manifest = {}
        for rank, report in enumerate(reports):
            file = unpublished / f"rank-{rank:05d}.safetensors"
            if not file.is_file():
                return f"{file}, which rank {rank} has written, is not here; checkpoint.dir must be on a shared disk"
            manifest[file.name] = FileFacts(report["size"], report["digest"])
        index = merge(self._indices[rank][1] for rank in range(self._size))
        check_index(index, str(unpublished))
        for name, text in ((INDEX, write_index(index)), (STATE, values)):
            write_text_atomically(unpublished / name, text)
            manifest[name] = FileFacts(len(text.encode()), file_digest(unpublished / name))
        write_manifest(unpublished, manifest)
        before()
        publish(unpublished, checkpoint_path(self.directory, step))
        # The checkpoint is there; one too many costs room only, and goes the next time.
        with suppress(OSError):
            prune(self.directory, self._keep)
        return None

    def _keep_index(self, rank: int, digest: str) -> None:
        """Know what lies in the file of `rank`; asked for when it has changed."""
        if self._indices.get(rank, ("", {}))[0] != digest:
            key = f"index {rank} {digest}"
            self._indices[rank] = digest, parse_index(self._store.get(key))
            self._store.delete_key(key)


def in_words(error: Exception, path: Path) -> str:
    """Why something could not be written, as one line."""
    if isinstance(error, OSError):
        return f"cannot write {error.filename or path}: {error.strerror or os.strerror(error.errno or 0)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
