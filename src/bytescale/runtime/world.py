"""The ranks of a run: device, process groups, identity. Opened once, closed at the end.

Without a pipeline two groups over the same ranks exist: the default one for FSDP2 and the step's numbers, one for
attention's P2P. With a pipeline each stage has its own two, and two over all ranks carry its P2P, one a direction. With
tensor parallelism each TP rank of a stage has its own two, and the TP ranks of each HDP rank share one for collectives.
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

from bytescale.arrays import IntArray
from bytescale.config.schema import ParallelConfig
from bytescale.errors import CommunicationError
from bytescale.locks import launcher_name
from bytescale.plan.order import FORWARD
from bytescale.runtime.grid import Grid
from bytescale.runtime.p2p import PeerToPeer, collective, first_line
from bytescale.runtime.presence import Presence
from bytescale.runtime.tensor_parallel.group import TensorGroup
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
    """This rank among the others: world rank = (stage * hdp_size + hdp_rank) * tp_size + tp_rank.

    Attributes:
        rank, size: position in and size of the world.
        hdp_rank, hdp_size: position among and number of the HDP ranks (with a pipeline: of pipelines).
        stage, pp_size: position in and length of the pipeline.
        device: where this rank computes.
        everyone: collectives of all ranks on CPU tensors: the step's numbers.
        group: FSDP2's collectives, over the HDP ranks of this stage and TP rank.
        shards: groups inside `group` where parallel.shard_size is below hdp_size; else None.
        comm: attention's P2P, over the same ranks as `group`.
        pipe: the pipeline's P2P over all ranks, one for each of FORWARD and BACKWARD; empty without a pipeline.
        tp: the ranks that share this HDP rank's layers; None where it has them to itself.
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
    tp: TensorGroup | None = None

    @property
    def tp_rank(self) -> int:
        """Position among the TP ranks of this HDP rank."""
        return 0 if self.tp is None else self.tp.rank

    @property
    def tp_size(self) -> int:
        """TP ranks of an HDP rank."""
        return 1 if self.tp is None else self.tp.size

    @property
    def stage_size(self) -> int:
        """Ranks of one stage; those of stage s begin at s * stage_size."""
        return self.hdp_size * self.tp_size

    @property
    def links(self) -> "tuple[PeerToPeer | TensorGroup, ...]":
        """Everything that exchanges while micro-batches run."""
        return (self.comm, *self.pipe, *([] if self.tp is None else [self.tp]))

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
        return (self.rank + (self.stage_size if direction == FORWARD else -self.stage_size)) % self.size

    def pipe_source(self, direction: int) -> int:
        """World rank that this one receives from on `pipe[direction]`."""
        return (self.rank - (self.stage_size if direction == FORWARD else -self.stage_size)) % self.size

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
    return {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "launcher": launcher_name()}


@contextmanager
def open_world(
    here: Presence,
    comm_timeout_s: float,
    parallel: ParallelConfig | None = None,
    device_type: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[World]:
    """Wait until every rank has prepared, then join them.

    On an error inside the block the groups are left as they are: destroying them waits for what is under way, which
    other ranks may never join. The process must report the error and end.

    Args:
        here: this rank among the others.
        comm_timeout_s: bound of every wait on another rank from here on.
        parallel: the axes of the world, checked against its size; None is HDP alone.
        device_type: `cpu` or `cuda`; the GPU is that of the local rank.
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
            world = join_groups(rank, size, parallel or ParallelConfig(), device, comm_timeout_s)
        yield world
    except BaseException:
        if size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


Wrap = Callable[[str, Transport], Transport]
"""Puts something between the link of this name (attention, forward, backward) and its transport."""

MakeGroup = Callable[[Sequence[int]], dist.ProcessGroup]
"""Makes the group of these world ranks; called by all ranks of the world in one order."""


def join_groups(
    rank: int,
    size: int,
    parallel: ParallelConfig,
    device: torch.device,
    timeout_s: float,
    new_group: MakeGroup | None = None,
    wrap: Wrap | None = None,
) -> World:
    """Make the groups of every line of ranks, in the same order on all ranks, and keep this rank's.

    Args:
        rank, size: position in and size of the world.
        parallel: its axes.
        device: where this rank computes.
        timeout_s: bound of every wait.
        new_group: makes a group; None makes one of the run's back-end with this bound.
        wrap: puts something between each link and its transport, to watch what passes.
    """
    grid = Grid.of_world(size, parallel.pp_size, parallel.tp_size)
    stage, hdp_rank, _ = grid.place(rank)
    new_group = new_group or _maker(device, timeout_s)

    def transport(link: str, group: dist.ProcessGroup | None) -> Transport:
        found = transport_of(group, device)
        return found if wrap is None else wrap(link, found)

    def own(lines: IntArray) -> dist.ProcessGroup:
        """The group of this rank, of one a line."""
        groups = [(line, new_group(line)) for line in lines.tolist()]
        return next(group for line, group in groups if rank in line)

    world = dist.group.WORLD
    everyone = new_group(range(size)) if world is None or world.size() != size else world
    lines = grid.hdp_lines()
    shards, shard_size = None, parallel.shard_size or grid.hdp_size
    if shard_size < grid.hdp_size:
        copies = lines.reshape(-1, grid.hdp_size // shard_size, shard_size)
        # Ranks that hold the same shard are the columns of each line's copies.
        replicas = copies.transpose(0, 2, 1).reshape(-1, grid.hdp_size // shard_size)
        shards = ShardGroups(own(copies.reshape(-1, shard_size)), own(replicas))
    group = everyone if grid.hdp_size == size else own(lines)
    attention = own(lines) if grid.hdp_size > 1 else None
    tp = TensorGroup(own(grid.tp_lines()), device) if grid.tp_size > 1 else None
    directions = ("forward", "backward") if grid.pp_size > 1 else ()
    pipes = [transport(direction, new_group(range(size))) for direction in directions]
    return World(
        rank=rank,
        size=size,
        hdp_rank=hdp_rank,
        hdp_size=grid.hdp_size,
        stage=stage,
        pp_size=grid.pp_size,
        device=device,
        everyone=everyone,
        group=group,
        shards=shards,
        comm=PeerToPeer(None, timeout_s, device, transport=transport("attention", attention)),
        pipe=open_pipe(pipes, grid.stage_size, timeout_s, device),
        tp=tp,
    )


def _maker(device: torch.device, timeout_s: float) -> MakeGroup:
    options: Any = {"timeout": timedelta(seconds=timeout_s), "backend": "nccl" if device.type == "cuda" else "gloo"}

    def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), **options)
        return group

    return new_group


def open_pipe(
    transports: Sequence[Transport], stage_size: int, timeout_s: float, device: torch.device
) -> tuple[PeerToPeer, ...]:
    """The P2P of a pipeline: FORWARD over the first of two groups of all ranks, BACKWARD over the second; a collective.

    A pipeline's stages are `stage_size` world ranks apart. Around the world the last stage comes before the first, so
    one offset a direction connects neighbours and, for tied weights, both ends.
    """
    return tuple(
        PeerToPeer(None, timeout_s, device, offsets=[offset], transport=transport)
        for transport, offset in zip(transports, (stage_size, -stage_size), strict=False)
    )
