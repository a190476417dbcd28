"""Point-to-point exchange between ranks over one fixed group.

The groups of a rank are the same whatever the plan: FSDP2's, attention's and two of the pipeline, one a direction, so
that none waits behind another (NCCL orders per communicator). There is never a group per sequence.

Rules kept here: connections are opened when a group is joined, in one order that all ranks share; a send is never
waited on before the next operation and its buffer lives until it completes; only receives block; sizes come from the
plan on both ends; every wait has a bound and an error that names both world ranks and the operation. On NCCL, where
waits order streams and never raise, `bytescale.runtime.presence` and NCCL's own watchdog are the bound.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from bytescale.errors import CommunicationError
from bytescale.runtime.transport import Message, Pending, Transport, transport_of
from bytescale.runtime.waits import Wait, WaitLog


@dataclass
class Transfer:
    """Messages under way, and the tensors that must live as long; `PeerToPeer.wait` completes receives."""

    what: str
    pending: list[Pending] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


class PeerToPeer:
    """One group of this rank that exchanges point to point: attention's, or a direction of the pipeline.

    State is what is in flight and what was counted since `reset_counters`: `bytes_sent` and `waits`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        device: torch.device,
        *,
        offsets: Iterable[int] | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Join the group; a collective.

        Args:
            group: ranks that may exchange; None for a single rank, which never does.
            timeout_s: bound of every wait.
            device: where the tensors live.
            offsets: a rank r may send to r + offset, counted around the group, for each of these; None is all.
            transport: what moves the messages; None takes the back-end of the group.
        """
        self._transport = transport if transport is not None else transport_of(group, device)
        self._timeout = timedelta(seconds=timeout_s)
        self._unfinished: list[Transfer] = []
        self._log = WaitLog(device)
        self.rank = self._transport.rank
        self.size = len(self._transport.world_ranks)
        self.bytes_sent = 0
        self._open(range(1, self.size) if offsets is None else offsets, device)

    def _open(self, offsets: Iterable[int], device: torch.device) -> None:
        """Send one element over every connection, all ranks around the group at the same offset.

        NCCL connects two ranks at their first message and blocks the host meanwhile. In the order of a plan that can
        wait in a circle; in this order it cannot: the ranks at the lowest offset of all always find each other.
        """
        for offset in offsets:
            token, received = torch.zeros(2, 1, device=device)
            sends = [Message((self.rank + offset) % self.size, token, 0)]
            receives = [Message((self.rank - offset) % self.size, received, 0)]
            self.wait(self.post("connection", sends, receives))
            self.drain()
        self.reset_counters()

    def reset_counters(self) -> None:
        self.bytes_sent = 0
        self._log.reset()

    def next_operation(self) -> None:
        """Waits from here on count as those of another operation."""
        self._log.next_operation()

    def waits(self) -> list[Wait]:
        """Waits for receives since `reset_counters`, one entry for each (operation, kind) that had any.

        On CUDA of the stream; this call waits until the stream has passed them.
        """
        return self._log.waits()

    def post(self, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start an exchange and return at once.

        Args:
            what: `kv`, `dkv` or `pipeline`, for errors and counters.
            sends: contiguous tensors; their storage must not be written until the `drain` that passes them.
            receives: contiguous buffers of exactly the size the peer sends.
        """
        if not sends and not receives:
            return Transfer(what)
        self.bytes_sent += sum(m.tensor.numel() * m.tensor.element_size() for m in sends)
        outgoing, incoming = self._transport.exchange(sends, receives)
        if outgoing:
            self._unfinished.append(Transfer(what, outgoing, [m.tensor for m in sends]))
        return Transfer(what, incoming, [m.tensor for m in receives])

    def wait(self, transfer: Transfer) -> None:
        """Block (on CUDA: make the current stream wait) until the receives of `transfer` are there.

        Raises:
            CommunicationError: a peer did not answer within the bound, or is gone.
        """
        if not transfer.pending:
            return
        begin = self._log.begin(transfer.what)
        self._finish(transfer, "from")
        self._log.end(transfer.what, begin)

    def drain(self, *, keep: int = 0) -> None:
        """Wait for all sends but the `keep` newest exchanges; afterwards their buffers may be reused."""
        while len(self._unfinished) > keep:
            self._finish(self._unfinished.pop(0), "to")

    @property
    def num_unfinished(self) -> int:
        """Exchanges whose sends have not been waited for."""
        return len(self._unfinished)

    def _finish(self, transfer: Transfer, direction: str) -> None:
        for handle, peer in transfer.pending:
            begin_s = time.perf_counter()
            try:
                handle.wait(self._timeout)
            except RuntimeError as error:
                waited_s = time.perf_counter() - begin_s
                ranks = self._transport.world_ranks
                whom = f"{direction} rank {ranks[peer]}" if peer is not None else "with its peers"
                raise CommunicationError(
                    f"rank {ranks[self.rank]}: {transfer.what} transfer {whom} failed after {waited_s:.1f} s "
                    f"(bound {self._timeout.total_seconds():.0f} s): {first_line(error)}"
                ) from error
        transfer.pending.clear()
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
