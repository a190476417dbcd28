"""Point-to-point exchange between ranks over one fixed group.

A rank is in three groups at most, whatever the plan: FSDP2's, attention's and the pipeline's, so that none waits behind
another (NCCL orders per communicator). There is never a group per sequence.

Rules kept here: a send is never waited on before the next operation and its buffer lives until it completes; only
receives block; sizes come from the plan on both ends; every wait has a bound and an error that names both ranks and the
operation. On NCCL an exchange is one `batch_isend_irecv`; on gloo single tagged operations, which lets every parcel be
waited for, and named, by itself.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bytescale.errors import CommunicationError


@dataclass(frozen=True)
class Message:
    """One contiguous tensor to or from `peer`, a rank of the group; `tag` is equal on both ends."""

    peer: int
    tensor: torch.Tensor
    tag: int


@dataclass(frozen=True)
class Wait:
    """Time that this rank stood still for a receive of `what`; `begin_s` counts as `perf_counter`."""

    what: str
    begin_s: float
    duration_s: float


@dataclass
class Transfer:
    """Receives under way; `PeerToPeer.wait` completes them."""

    what: str
    works: list[tuple[dist.Work, int | None]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


class PeerToPeer:
    """One group of this rank that exchanges point to point: attention's, or the pipeline's.

    State is what is in flight and what was counted since `reset_counters`: `bytes_sent` and `waits`.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, device: torch.device) -> None:
        """Join the group; a collective.

        Args:
            group: ranks that may exchange; None for a single rank, which never does.
            timeout_s: bound of every wait.
            device: where the tensors live.
        """
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._batched = device.type == "cuda"
        self._unfinished: list[Transfer] = []
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.bytes_sent = 0
        self._waits: list[tuple[str, float, Any, Any]] = []
        if group is not None:
            # The first operation opens connections between all pairs, which must not happen in the order of a plan.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def reset_counters(self) -> None:
        self.bytes_sent = 0
        self._waits = []

    def waits(self) -> list[Wait]:
        """Every wait for a receive since `reset_counters`; on CUDA of the stream, so synchronise first."""
        return [
            Wait(what, at_s, begin.elapsed_time(end) / 1e3 if self._batched else end - begin)
            for what, at_s, begin, end in self._waits
        ]

    def _mark(self) -> Any:
        """A point in time: a recorded event on CUDA, seconds elsewhere."""
        if not self._batched:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def post(self, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start an exchange and return at once.

        Args:
            what: `kv`, `dkv` or `pipeline`, for errors and counters.
            sends: contiguous tensors; their storage must not be written until the `drain` that passes them.
            receives: contiguous buffers of exactly the size the peer sends.
        """
        self.bytes_sent += sum(m.tensor.numel() * m.tensor.element_size() for m in sends)
        transfer = Transfer(what, buffers=[m.tensor for m in (*sends, *receives)])
        outgoing = Transfer(what, buffers=[m.tensor for m in sends])
        if self._batched:
            operations = [self._operation(dist.isend, m) for m in sends]
            operations += [self._operation(dist.irecv, m) for m in receives]
            if operations:
                transfer.works = [(work, None) for work in dist.batch_isend_irecv(operations)]
            return transfer
        for m in receives:
            work = dist.irecv(m.tensor, group=self._group, group_src=m.peer, tag=m.tag)
            assert work is not None
            transfer.works.append((work, m.peer))
        for m in sends:
            work = dist.isend(m.tensor, group=self._group, group_dst=m.peer, tag=m.tag)
            assert work is not None
            outgoing.works.append((work, m.peer))
        if outgoing.works:
            self._unfinished.append(outgoing)
        return transfer

    def _operation(self, call: Callable[..., dist.Work | None], message: Message) -> dist.P2POp:
        return dist.P2POp(call, message.tensor, group=self._group, group_peer=message.peer)

    def wait(self, transfer: Transfer) -> None:
        """Block (on CUDA: make the current stream wait) until the receives of `transfer` are there.

        Raises:
            CommunicationError: a peer did not answer within the bound, or is gone.
        """
        if not transfer.works:
            return
        at_s, begin = time.perf_counter(), self._mark()
        self._finish(transfer, "from")
        self._waits.append((transfer.what, at_s, begin, self._mark()))

    def drain(self, *, keep: int = 0) -> None:
        """Wait for all sends but the `keep` newest exchanges; afterwards their buffers may be reused."""
        while len(self._unfinished) > keep:
            self._finish(self._unfinished.pop(0), "to")

    @property
    def num_unfinished(self) -> int:
        """Exchanges whose sends have not been waited for."""
        return len(self._unfinished)

    def _finish(self, transfer: Transfer, direction: str) -> None:
        for work, peer in transfer.works:
            begin_s = time.perf_counter()
            try:
                if self._batched:
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                waited_s = time.perf_counter() - begin_s
                whom = f"{direction} rank {peer}" if peer is not None else "with its peers"
                raise CommunicationError(
                    f"rank {self.rank}: {transfer.what} transfer {whom} failed after {waited_s:.1f} s "
                    f"(bound {self._timeout.total_seconds():.0f} s): {first_line(error)}"
                ) from error
        transfer.works.clear()
        transfer.buffers.clear()


@contextmanager
def collective(rank: int, what: str) -> Iterator[None]:
    """Turn the failure of a collective inside the block into an error that names rank and operation.

    Raises:
        CommunicationError: a peer is gone or did not answer within the group's bound.
    """
    begin_s = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not _is_communication_failure(error):
            raise
        waited_s = time.perf_counter() - begin_s
        raise CommunicationError(f"rank {rank}: {what} failed after {waited_s:.1f} s: {first_line(error)}") from error


def _is_communication_failure(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/", "NCCL", "ProcessGroup"))


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without the source location and the advice that gloo puts around it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\]\s*|\. This is typically caused by.*$", "", line)
