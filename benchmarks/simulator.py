"""Predicted against measured step times on this machine: two gloo ranks, one core each.

Each rank is pinned to a core and computes with one thread. Rank 0 profiles layers, blocks and head, both measure their
link and the fixed part of a step (one without a micro-batch); the simulator then predicts every batch of the quickstart
data for `static` and `hdp-balance`, and both are run, in turn, each batch `--repeats` times, of which the fastest
counts. The ratio of a batch is that of its two step times.

Wall time needs two idle cores. With `--cpu-time` a step counts the CPU time of the busiest rank's computing thread,
which other processes disturb little, against the busiest rank's predicted own time: waiting is in neither.

python -m benchmarks.simulator             about fifteen minutes on two idle cores
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import on_ranks, report
from bytescale.config.schema import Config, ParallelConfig
from bytescale.config.toml import load_config
from bytescale.cost.profile import make_profile, profile_cost
from bytescale.data import LoaderState, StepData, next_batch, read_micro_batch
from bytescale.plan.share import rank_share
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.planner import plan as make_plan
from bytescale.profiler.measure import (
    Clock,
    length_grid,
    measure_activations,
    measure_blocks,
    measure_head,
    measure_layer,
    measure_link,
    two_layers,
)
from bytescale.runtime.attention.kernels import select_kernel
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.world import World, join_groups
from bytescale.simulator import StepOverheads, simulate
from bytescale.train.prepare import Prepared, prepare
from bytescale.train.step import run_step
from bytescale.train.trainer import build_model

NUM_BATCHES, ROUNDS = 20, 2
STRATEGIES = ("static", "hdp-balance")
TOKENS_PER_RANK = 8192


def quickstart() -> Config:
    """The quickstart's model and data on two ranks, which hold its context of 16K together."""
    config = load_config(Path("configs/quickstart.toml"), {})
    plan = replace(config.plan, tokens_per_rank=TOKENS_PER_RANK, offload="off")
    return replace(config, plan=plan)


def open_pinned_world(rank: int, size: int) -> World:
    """This rank on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    return join_groups(rank, size, ParallelConfig(), torch.device("cpu"), 600.0)


def measure_profile(config: Config, prepared: Prepared, world: World) -> Any:
    """The cost model of this machine, on every rank."""
    clock, kernel = Clock(world.device), select_kernel(world.device)
    points: list[Any] = [None]
    if world.rank == 0:
        model = two_layers(prepared.model_config, world.device, torch.float32)
        like = torch.empty(0)
        lengths, held_out = length_grid(config.data.max_context, 64)
        layer = measure_layer(model, kernel, sorted({*lengths, *held_out}), clock, ROUNDS)
        chosen = [i for i, length in enumerate(layer["length"]) if length in lengths]
        points[0] = {
            "layer": {name: [values[i] for i in chosen] for name, values in layer.items()},
            "block": measure_blocks(prepared.shape, kernel, [128, 256, 512, 1024, 2048, 4096], clock, ROUNDS, like),
            "activation": measure_activations(model, kernel, lengths[::3], clock),
            "head": measure_head(prepared.shape, [512, 2048, 8192], clock, ROUNDS, like),
            "held_out": {"length": [], "forward_s": [], "backward_s": []},
            "inter_node": {"num_bytes": [], "time_s": []},
            "copy": {name: [1e9] for name in ("out_alone", "in_alone", "out_both", "in_both")},
        }
    dist.barrier()
    link = measure_link(world.comm, 1 - world.rank, world.device, clock)
    dist.broadcast_object_list(points, 0)
    both = [link]
    dist.broadcast_object_list(both, 0)
    profile = make_profile(
        points=points[0] | {"intra_node": both[0]},
        model=prepared.shape,
        device="cpu",
        hardware="this machine",
        versions={},
        settings={},
        ranks_per_node=world.size,
    )
    return profile_cost(profile)


def steps_of(config: Config, prepared: Prepared, cost: Any, strategy: str, world: World) -> list[StepData]:
    """The same batches for every strategy."""
    steps, state = [], LoaderState()
    for number in range(1, NUM_BATCHES + 1):
        batch, state = next_batch(prepared.dataset, config.batch, 0, state)
        plan = make_plan(
            batch.lengths,
            strategy,
            hdp_size=world.size,
            tokens_per_rank=TOKENS_PER_RANK,
            cost=cost,
            context=config.data.max_context,
        )
        rows = plan.micro_batch_rows(world.rank)
        own = tuple(read_micro_batch(prepared.dataset, batch, plan, chosen) for chosen in rows)
        steps.append(StepData(number, batch, rank_share(plan, world.rank), own, 0.0, 0.0, state))
    return steps


def empty_plan(size: int) -> StepPlan:
    """A step without a micro-batch: what every step costs beside them."""
    none: list[int] = []
    return step_plan(
        strategy="empty",
        hdp_size=size,
        tokens_per_rank=TOKENS_PER_RANK,
        num_layers=1,
        lengths=none,
        sequence=none,
        rank=none,
        micro_batch=none,
        tokens=none,
        cp_degree=none,
        cp_index=none,
    )


def compare(rank: int, size: int, repeats: int, cpu_time: bool) -> dict[str, Any]:
    """Measure and predict; the slower rank's time counts."""
    config, world = quickstart(), open_pinned_world(rank, size)
    prepared = prepare(config, size)
    cost = measure_profile(config, prepared, world)
    model = build_model(config, prepared)
    shard_model(model, world, torch.float32)
    kernel = select_kernel(world.device)

    clock = time.thread_time if cpu_time else time.perf_counter

    def seconds(data: StepData) -> float:
        dist.barrier()
        begin_s = clock()
        run_step(model, kernel, world, data)
        longest = torch.tensor([clock() - begin_s], dtype=torch.float64)
        model.zero_grad()
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    steps = {name: steps_of(config, prepared, cost, name, world) for name in STRATEGIES}
    empty = replace(steps["static"][0], micro_batches=(), plan=empty_plan(size))
    for data in (empty, *steps["static"][:2], *steps["hdp-balance"][:2]):
        seconds(data)
    fixed_s = min(seconds(empty) for _ in range(10))
    measured = {name: [float("inf")] * NUM_BATCHES for name in STRATEGIES}
    for _ in range(repeats):
        for i in range(NUM_BATCHES):
            for name in STRATEGIES:
                measured[name][i] = min(measured[name][i], seconds(steps[name][i]))
    predicted = {name: [predicted_s(data, cost, fixed_s, cpu_time) for data in steps[name]] for name in STRATEGIES}
    return {"measured": measured, "predicted": predicted, "fixed_s": fixed_s}


def predicted_s(data: StepData, cost: Any, fixed_s: float, cpu_time: bool) -> float:
    """The simulated step, or the own time of its busiest rank."""
    step = simulate(data.plan, cost, StepOverheads(update_s=fixed_s))
    if not cpu_time:
        return step.step_time_s
    return float((step.ranks.compute_s + step.ranks.copy_s).max()) + fixed_s


def row(what: str, ours: np.ndarray[Any, Any], real: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Error of the mean, and the spread over batches."""
    error = 100 * (ours / real - 1)
    return {
        "what": what,
        "batches": len(ours),
        "measured, mean": float(real.mean()),
        "predicted, mean": float(ours.mean()),
        "error of the mean %": 100 * float(ours.mean() / real.mean() - 1),
        "mean |error| %": float(np.abs(error).mean()),
        "std of error %": float(error.std()),
        "worst |error| %": float(np.abs(error).max()),
    }


def main() -> None:
    """Print the errors and their spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    asked = parser.parse_args()
    result = on_ranks(2, compare, asked.repeats, asked.cpu_time)
    real, ours = ({n: np.array(v) for n, v in result[key].items()} for key in ("measured", "predicted"))
    rows = [row(f"{name}, s a step", ours[name], real[name]) for name in STRATEGIES]
    left, right = STRATEGIES
    rows.append(row(f"{left} / {right}", ours[left] / ours[right], real[left] / real[right]))
    clock = "CPU time of the busiest rank" if asked.cpu_time else "wall time"
    report(f"Simulator against two gloo ranks, one core each, {clock}, best of {asked.repeats}", rows)
    print(f"\nfixed part of a step: {1e3 * result['fixed_s']:.1f} ms")


if __name__ == "__main__":
    main()
