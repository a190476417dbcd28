"""Profiling as a run: opens the ranks, measures in turn, brings the points together on rank 0.

Compute and copies are measured by rank 0 alone while the others wait at a collective, which does not spin; then rank 0
and one partner on the same machine, and one on another machine where there is one, measure their link. Cost: that of
`bytescale.profiler.measure`.
"""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytescale.config.schema import Config
from bytescale.cost import cluster_spec
from bytescale.cost.model import ModelShape
from bytescale.profiler.measure import (
    LINK_BYTES,
    Clock,
    Table,
    length_grid,
    measure_activations,
    measure_blocks,
    measure_copies,
    measure_embedding,
    measure_head,
    measure_layer,
    measure_link,
    two_layers,
)
from bytescale.runtime.attention.kernels import check_kernel, select_kernel
from bytescale.runtime.device import TORCH_DTYPES, Machine, resolve
from bytescale.runtime.model.hf_config import shape_of_config
from bytescale.runtime.offload.disk import check_directory
from bytescale.runtime.p2p import collective
from bytescale.runtime.presence import presence
from bytescale.runtime.world import World, open_world
from bytescale.train.offload import open_tier
from bytescale.train.prepare import model_and_tokenizer

Points = dict[str, Table]

PRESET_CLUSTER = "h100"
"""Whose link a single rank is given, which has none to measure."""


def decide(nproc: int | None, config: Config) -> tuple[int, Config]:
    """How many ranks measure, and `config` with device and type decided.

    Two by default, so that a link is measured; on CUDA no more than there are GPUs.

    Raises:
        UserError: the machine cannot run what is asked.
    """
    num_gpus = Machine.here().num_gpus if config.train.device != "cpu" else 0
    nproc = nproc if nproc is not None else min(2, num_gpus or 2)
    return nproc, resolve(config, Machine.here(nproc))


def measure(config: Config, longest: int, rounds: int) -> tuple[ModelShape, str, Points, int, str] | None:
    """(sizes, device type, points, ranks per machine, where links come from) on rank 0, None elsewhere.

    Args:
        config: the run, with device and type decided.
        longest: greatest length measured.
        rounds: runs of every point.

    Raises:
        UserError: model or offload directory cannot be used.
    """
    if config.train.compute_threads is not None:
        torch.set_num_threads(config.train.compute_threads)
    timeout_s, device = config.run.comm_timeout_s, config.train.device
    with presence(timeout_s, None) as here, open_world(here, timeout_s, device_type=device) as world:
        model_config, _ = model_and_tokenizer(config, longest)
        shape = shape_of_config(model_config, 4 if config.train.dtype == "float32" else 2)
        check_kernel(config.train.device, TORCH_DTYPES[config.train.dtype], shape.head_dim)
        hosts: list[Any] = [None] * world.size
        with collective(world.rank, "starting the profile"):
            dist.all_gather_object(hosts, socket.gethostname())
        points = _compute_points(config, model_config, shape, world, longest, rounds) if world.rank == 0 else {}
        with collective(world.rank, "waiting for rank 0"):
            dist.barrier()
        points |= _link_points(world, hosts)
        if world.rank != 0:
            return None
        link = "measured" if world.size > 1 else f"preset {PRESET_CLUSTER}"
        return shape, world.device.type, points, hosts.count(hosts[0]), link


def _compute_points(
    config: Config, model_config: Any, shape: ModelShape, world: World, longest: int, rounds: int
) -> Points:
    dtype = TORCH_DTYPES[config.train.dtype]
    kernel = select_kernel(world.device)
    clock = Clock(world.device)
    model = two_layers(model_config, world.device, dtype)
    like = torch.empty(0, dtype=dtype, device=world.device)
    lengths, held_out = length_grid(longest)
    measured = measure_layer(model, kernel, sorted({*lengths, *held_out}), clock, rounds)
    edges = [edge for edge in (128, 256, 512, 1024, 2048, 4096) if edge <= longest]
    few = [length for length in lengths if length >= 512][:: max(1, len(lengths) // 4)]
    check_directory(Path(config.offload.dir or config.run.dir))
    tier = open_tier(config, world.device)
    try:
        copies = measure_copies(tier, world.device)
    finally:
        tier.close()
    return {
        "layer": _rows(measured, lengths),
        "held_out": _rows(measured, held_out),
        "block": measure_blocks(shape, kernel, edges, clock, rounds, like),
        "activation": measure_activations(model, kernel, lengths[:: max(1, len(lengths) // 5)], clock),
        "head": measure_head(shape, few, clock, rounds, like),
        "embedding": measure_embedding(shape, few[-1], clock, rounds, like),
        "copy": copies,
    }


def _rows(table: Table, lengths: list[int]) -> Table:
    chosen = [i for i, length in enumerate(table["length"]) if length in lengths]
    return {name: [values[i] for i in chosen] for name, values in table.items()}


def _link_points(world: World, hosts: list[str]) -> Points:
    """Links of rank 0 to a partner on its machine and to one on another; the other ranks wait.

    One rank alone has none to measure and is given a preset's.
    """
    if world.size == 1:
        link = cluster_spec(PRESET_CLUSTER).intra_node
        preset: Table = {"num_bytes": [*map(float, LINK_BYTES)], "time_s": [link.time_s(n) for n in LINK_BYTES]}
        return {"intra_node": preset, "inter_node": {"num_bytes": [], "time_s": []}}
    clock = Clock(world.device, waiting_counts=True)
    points: Points = {"inter_node": {"num_bytes": [], "time_s": []}}
    for name, same in (("intra_node", True), ("inter_node", False)):
        partner = next((r for r in range(1, world.size) if (hosts[r] == hosts[0]) == same), None)
        if partner is not None and world.rank in (0, partner):
            points[name] = measure_link(world.comm, partner if world.rank == 0 else 0, world.device, clock)
        with collective(world.rank, f"measuring the {name} link"):
            dist.barrier()
    if "intra_node" not in points:
        points["intra_node"] = points["inter_node"]
    return points
