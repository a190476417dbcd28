"""The ranks of a run: device, process groups, identity. Opened once, closed at the end.

Exactly two groups over the same ranks: the default one for FSDP2 and metrics, one for attention's P2P. A single process
is a world of one rank and runs the same code. Environment variables are those that torchrun sets, nothing else.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bytescale.errors import CommunicationError
from bytescale.runtime.comm import PeerToPeer, collective, first_line


@dataclass(frozen=True)
class World:
    """This rank among the others.

    Attributes:
        rank, size: position in and size of the world; without pipeline and tensor parallelism also of HDP.
        device: where this rank computes.
        group: collectives of FSDP2 and of the step's metrics.
        comm: attention's P2P.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    comm: PeerToPeer

    def all_gather_numbers(self, values: list[float]) -> torch.Tensor:
        """The lists of all ranks as an fp64 matrix [size, len(values)] on the CPU; a collective."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = own.new_empty(self.size * len(values))
        dist.all_gather_single(everyone, own, group=self.group)
        return everyone.view(self.size, len(values)).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; an empty list elsewhere. A collective, for small host objects."""
        gathered: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, gathered if self.rank == 0 else None, group=self.group)
        return gathered


def process_identity(rank: int) -> dict[str, Any]:
    """One entry of `processes.json`."""
    return {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}


@contextmanager
def open_world(comm_timeout_s: float) -> Iterator[World]:
    """Join the ranks that torchrun describes, or be a world of one.

    Args:
        comm_timeout_s: bound of every wait on another rank.

    Raises:
        CommunicationError: the ranks did not meet within the bound.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ["RANK"]) if launched else 0
    size = int(os.environ["WORLD_SIZE"]) if launched else 1
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=comm_timeout_s)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=None if launched else dist.HashStore(),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(f"rank {rank}: the {size} ranks did not meet: {first_line(error)}") from error
    try:
        with collective(rank, "setting up the process groups"):
            attention = dist.new_group(timeout=timeout) if size > 1 else None
            group = dist.group.WORLD
            assert group is not None
            comm = PeerToPeer(attention, comm_timeout_s, device)
        yield World(rank, size, device, group, comm)
    finally:
        dist.destroy_process_group()
