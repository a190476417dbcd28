"""The ranks of a run: device, process groups, identity. Opened once, closed at the end.

Without a pipeline two groups over the same ranks exist: the default one for FSDP2 and the step's numbers, one for
attention's P2P. With a pipeline each stage has its own two, and the default group carries the pipeline's P2P; the
step's numbers pass over it between the phases. A single process is a world of one rank and runs the same code.
Environment variables are those that torchrun sets, nothing else.
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
from bytescale.runtime.p2p import PeerToPeer, collective, first_line
from bytescale.runtime.pipeline import StagePosition


@dataclass(frozen=True)
class World:
    """This rank among the others: world rank = stage * hdp_size + hdp_rank.

    Attributes:
        rank, size: position in and size of the world.
        hdp_rank, hdp_size: position among and number of the ranks of this stage (with a pipeline: of pipelines).
        stage, pp_size: position in and length of the pipeline.
        device: where this rank computes.
        everyone: collectives of all ranks: the step's numbers.
        group: FSDP2's collectives, over the ranks of this stage.
        comm: attention's P2P, over the ranks of this stage.
        pipe: the pipeline's P2P, over all ranks; None without a pipeline.
    """

    rank: int
    size: int
    hdp_rank: int
    hdp_size: int
    stage: int
    pp_size: int
    device: torch.device
    everyone: dist.ProcessGroup
    group: dist.ProcessGroup
    comm: PeerToPeer
    pipe: PeerToPeer | None = None

    @property
    def other_end(self) -> int:
        """World rank of the last stage of this pipeline on the first stage, and the other way round."""
        return self.hdp_rank + (0 if self.stage else (self.pp_size - 1) * self.hdp_size)

    def position(self, hidden_size: int, dtype: torch.dtype) -> StagePosition:
        """This rank in its pipeline, for hidden states of that size and type."""
        return StagePosition(
            stage=self.stage,
            pp_size=self.pp_size,
            previous=self.rank - self.hdp_size,
            following=self.rank + self.hdp_size,
            pipe=self.pipe,
            hidden_size=hidden_size,
            dtype=dtype,
        )

    def all_gather_numbers(self, values: list[float]) -> torch.Tensor:
        """The lists of all ranks as an fp64 matrix [size, len(values)] on the CPU; a collective."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = own.new_empty(self.size * len(values))
        dist.all_gather_single(everyone, own, group=self.everyone)
        return everyone.view(self.size, len(values)).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; an empty list elsewhere. A collective, for small host objects."""
        gathered: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, gathered if self.rank == 0 else None, group=self.everyone)
        return gathered


def process_identity(rank: int) -> dict[str, Any]:
    """One entry of `processes.json`."""
    return {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}


@contextmanager
def open_world(comm_timeout_s: float, pp_size: int = 1) -> Iterator[World]:
    """Join the ranks that torchrun describes, or be a world of one.

    Args:
        comm_timeout_s: bound of every wait on another rank.
        pp_size: pipeline stages; divides the world size.

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
            world = join_groups(rank, size, pp_size, device, comm_timeout_s)
        yield world
    finally:
        dist.destroy_process_group()


def join_groups(rank: int, size: int, pp_size: int, device: torch.device, timeout_s: float) -> World:
    """Make the groups of every stage, in the same order on all ranks, and keep this rank's."""
    everyone = dist.group.WORLD
    assert everyone is not None
    hdp_size = size // pp_size
    stage, hdp_rank = divmod(rank, hdp_size)
    timeout = timedelta(seconds=timeout_s)
    group, attention = everyone, None
    for number in range(pp_size):
        members = list(range(number * hdp_size, (number + 1) * hdp_size))
        sharding = dist.new_group(members, timeout=timeout) if pp_size > 1 else everyone
        peers = dist.new_group(members, timeout=timeout) if hdp_size > 1 else None
        if number == stage:
            group, attention = sharding, peers
    return World(
        rank=rank,
        size=size,
        hdp_rank=hdp_rank,
        hdp_size=hdp_size,
        stage=stage,
        pp_size=pp_size,
        device=device,
        everyone=everyone,
        group=group,
        comm=PeerToPeer(attention, timeout_s, device),
        pipe=PeerToPeer(everyone, timeout_s, device) if pp_size > 1 else None,
    )
