"""What moves messages between the ranks of a group: gloo, NCCL, or a stand-in.

gloo: single tagged operations, so that every message can be waited for, and named, by itself. A wait blocks the host
and raises when the peer is gone or late.

NCCL: one `batch_isend_irecv` an exchange, also for a single message: only batches are sure to use the communicator of
the group rather than one of their own. Its rules: the exchanges of a group run in the order in which they were posted
(tags mean nothing); data moves when both ends are there; the first message of a pair in a direction connects the two
and blocks the host until the other end posts it as well. A wait orders streams and never raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """One contiguous tensor to or from `peer`, a rank of the group; `tag` is equal on both ends."""

    peer: int
    tensor: torch.Tensor
    tag: int


class Handle(Protocol):
    """An operation under way."""

    def wait(self, timeout: timedelta) -> object:
        """Block the host, or make the current stream wait, until the buffer may be used."""


Pending = tuple[Handle, int | None]
"""An operation and its peer; no peer where one operation stands for a whole exchange."""


class Transport(Protocol):
    """A group of ranks that exchange tensors.

    Attributes:
        rank: this rank's number in the group.
        world_ranks: world ranks of the group, in order.
    """

    rank: int
    world_ranks: Sequence[int]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        """Start all messages and return what to wait for: (sends, receives)."""


class _OneRank:
    """A group of this rank alone, which never exchanges."""

    rank = 0
    world_ranks: Sequence[int] = (0,)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        assert not sends and not receives, "a single rank has no peer"
        return [], []


class _Group:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_ranks: Sequence[int] = dist.get_process_group_ranks(group)


class _Gloo(_Group):
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        incoming = [
            _pending(dist.irecv(m.tensor, group=self.group, group_src=m.peer, tag=m.tag), m.peer) for m in receives
        ]
        outgoing = [
            _pending(dist.isend(m.tensor, group=self.group, group_dst=m.peer, tag=m.tag), m.peer) for m in sends
        ]
        return outgoing, incoming


class _Nccl(_Group):
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        calls = [(dist.isend, m) for m in sends] + [(dist.irecv, m) for m in receives]
        operations = [dist.P2POp(call, m.tensor, group=self.group, group_peer=m.peer) for call, m in calls]
        works: list[Pending] = [(_OnStream(work), None) for work in dist.batch_isend_irecv(operations)]
        return works if sends else [], works if receives else []


class _OnStream:
    """A work of NCCL: with a timeout its wait would block the host, without one it orders streams."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self, timeout: timedelta) -> object:
        return self.work.wait()


def _pending(work: Any, peer: int) -> Pending:
    assert work is not None, "this rank is a member of its group"
    return work, peer


def transport_of(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """The transport of `group` for tensors on `device`; None is this rank alone."""
    if group is None:
        return _OneRank()
    return _Nccl(group) if device.type == "cuda" else _Gloo(group)
