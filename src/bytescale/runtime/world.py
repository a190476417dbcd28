"""The ranks of a run: device, process groups, identity. Opened once, closed at the end.

Without a pipeline two groups over the same ranks exist: the default one for FSDP2 and the step's numbers, one for
attention's P2P. With a pipeline each stage has its own two, and two over all ranks carry its P2P, one a direction.
Numbers and objects always travel between CPUs, over gloo: on CUDA the default group has both back-ends, the others NCCL
alone. A single process is a world of one rank and runs the same code. Environment variables read are those that
torchrun sets, nothing else.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from bytescale.errors import CommunicationError
from bytescale.plan.order import FORWARD
from bytescale.runtime.p2p import PeerToPeer, collective, first_line
from bytescale.runtime.presence import Presence
from bytescale.runtime.transport import Transport, transport_of


@dataclass(frozen=True)
class ShardGroups:
    """Groups of a rank when fewer ranks than all of its stage share a copy of the states.

    Attributes:
        copy: neighbours that hold one copy between them.
        replicas: ranks that hold the same shard of other copies.
    """

    copy: dist.ProcessGroup
    replicas: dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """This rank among the others: world rank = stage * hdp_size + hdp_rank.

    Attributes:
        rank, size: position in and size of the world.
        hdp_rank, hdp_size: position among and number of the ranks of this stage (with a pipeline: of pipelines).
        stage, pp_size: position in and length of the pipeline.
        device: where this rank computes.
        everyone: collectives of all ranks on CPU tensors: the step's numbers.
        group: FSDP2's collectives, over the ranks of this stage.
        shards: groups inside `group` where parallel.shard_size is below hdp_size; else None.
        comm: attention's P2P, over the ranks of this stage.
        pipe: the pipeline's P2P over all ranks, one for each of FORWARD and BACKWARD; empty without a pipeline.
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
    pipe: tuple[PeerToPeer, ...] = ()
    shards: ShardGroups | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.pp_size - 1

    def pipe_target(self, direction: int) -> int:
        """World rank that this one sends to on `pipe[direction]`; the stages of a pipeline form a circle."""
        return (self.rank + (self.hdp_size if direction == FORWARD else -self.hdp_size)) % self.size

    def pipe_source(self, direction: int) -> int:
        """World rank that this one receives from on `pipe[direction]`."""
        return (self.rank - (self.hdp_size if direction == FORWARD else -self.hdp_size)) % self.size

    def all_gather_numbers(self, values: list[float]) -> torch.Tensor:
        """The lists of all ranks as an fp64 matrix [size, len(values)] on the CPU; a collective."""
        own = torch.tensor(values, dtype=torch.float64)
        everyone = own.new_empty(self.size * len(values))
        dist.all_gather_single(everyone, own, group=self.everyone)
        return everyone.view(self.size, len(values))

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; an empty list elsewhere. A collective, for small host objects."""
        gathered: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, gathered if self.rank == 0 else None, group=self.everyone)
        return gathered


def process_identity(rank: int) -> dict[str, Any]:
    """One entry of `processes.json`."""
    return {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}


@contextmanager
def open_world(
    here: Presence,
    comm_timeout_s: float,
    pp_size: int = 1,
    device_type: str = "cpu",
    shard_size: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[World]:
    """Wait until every rank has prepared, then join them.

    On an error inside the block the groups are left as they are: destroying them waits for what is under way, which
    other ranks may never join. The process must report the error and end.

    Args:
        here: this rank among the others.
        comm_timeout_s: bound of every wait on another rank from here on.
        pp_size: pipeline stages; divides the world size.
        device_type: `cpu` or `cuda`; the GPU is that of the local rank.
        shard_size: ranks that share a copy of the states; a divisor of hdp_size, which None stands for.
        say: shows a line that says whom this rank waits for.

    Raises:
        CommunicationError: a rank failed or fell silent, or the ranks did not meet within the bound.
    """
    here.wait_for_all(say)
    rank, size = here.rank, here.size
    device = torch.device(device_type)
    if device_type == "cuda":
        # Compute, FSDP2, NCCL and copies use up to eleven streams; beyond the hardware's eight queues, some would share
        # one, and a transfer that waits for its peer would hold up what the peer waits for. Read with the context.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("groups", here.store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=comm_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(f"rank {rank}: the {size} ranks did not meet: {first_line(error)}") from error
    try:
        with collective(rank, "setting up the process groups"):
            world = join_groups(rank, size, pp_size, device, comm_timeout_s, shard_size)
        yield world
    except BaseException:
        if size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def join_groups(
    rank: int, size: int, pp_size: int, device: torch.device, timeout_s: float, shard_size: int | None = None
) -> World:
    """Make the groups of every stage, in the same order on all ranks, and keep this rank's."""
    everyone = dist.group.WORLD
    assert everyone is not None
    hdp_size = size // pp_size
    stage, hdp_rank = divmod(rank, hdp_size)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    group, attention = everyone, None
    for number in range(pp_size):
        members = list(range(number * hdp_size, (number + 1) * hdp_size))
        sharding = dist.new_group(members, timeout=timeout, backend=backend) if pp_size > 1 else everyone
        peers = dist.new_group(members, timeout=timeout, backend=backend) if hdp_size > 1 else None
        if number == stage:
            group, attention = sharding, peers
    shards = None
    if shard_size is not None and shard_size < hdp_size:
        copies = torch.arange(size).view(-1, shard_size)
        # Ranks that hold the same shard: columns of each stage's copies.
        replicas = torch.arange(size).view(pp_size, -1, shard_size).transpose(1, 2).flatten(0, 1)
        own = []
        for table in (copies, replicas):
            for members in table.tolist():
                joined = dist.new_group(members, timeout=timeout, backend=backend)
                if rank in members:
                    own.append(joined)
        shards = ShardGroups(*own)
    pipes = [dist.new_group(timeout=timeout, backend=backend) for _ in range(2 if pp_size > 1 else 0)]
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
        shards=shards,
        comm=PeerToPeer(attention, timeout_s, device),
        pipe=open_pipe([transport_of(pipe, device) for pipe in pipes], hdp_size, timeout_s, device),
    )


def open_pipe(
    transports: Sequence[Transport], hdp_size: int, timeout_s: float, device: torch.device
) -> tuple[PeerToPeer, ...]:
    """The P2P of a pipeline: FORWARD over the first of two groups of all ranks, BACKWARD over the second; a collective.

    World ranks of a pipeline's stages are `hdp_size` apart. Around the world the last stage comes before the first, so
    one offset a direction connects neighbours and, for tied weights, both ends.
    """
    return tuple(
        PeerToPeer(None, timeout_s, device, offsets=[offset], transport=transport)
        for transport, offset in zip(transports, (hdp_size, -hdp_size), strict=False)
    )
