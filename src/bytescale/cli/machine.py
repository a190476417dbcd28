"""What a simulated step runs on: the model's shape, what its pieces cost, links, the GPU's peak and memory.

Presets describe all of it by two names. A profile brings its own model, cost and links; a CPU has neither a peak nor a
memory that training must fit, a GPU those of `--cluster`. `dense-flops` counts FLOPs of its own, so it has no
utilisation either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bytescale.cli.planning import COSTS, chosen_cost, chosen_profile
from bytescale.cost import ClusterSpec, CostModel, ModelShape, Ulysses, cluster_spec, head_exchange, model_shape
from bytescale.report import units
from bytescale.simulator.memory import HOST_SHARE, PeakMemory


@dataclass(frozen=True)
class Machine:
    """A described machine and the model on it.

    Attributes:
        model: sizes, for states, memory and FLOPs.
        cost: what pieces cost.
        cluster: links of collectives and stages; with a profile those that were measured.
        peak_of: cluster whose data-sheet peak counts; None where utilisation means nothing.
        memory_bytes: of one GPU; None on a CPU.
        host_bytes: what offloading may take of the host, a GPU's share; None on a CPU, whose offload goes to disk.
    """

    model: ModelShape
    cost: CostModel
    cluster: ClusterSpec
    peak_of: str | None
    memory_bytes: float | None
    host_bytes: float | None


def ulysses_of(attention: str, machine: Machine, tp_size: int) -> Ulysses | None:
    """What `--attention` asks the simulator to exchange."""
    return head_exchange(machine.model, tp_size) if attention == "ulysses" else None


def described_machine(options: dict[str, Any]) -> Machine:
    """The machine of the shared options.

    Raises:
        UserError: an unknown name, or a profile that cannot be read or used.
    """
    name, cost_name = options["cluster"], options["cost_name"]
    cost = chosen_cost(options["model"], name, cost_name, options["tp_size"], recompute=options["recompute"])
    cluster = cluster_spec(name)
    profile = chosen_profile(cost_name)
    host_bytes = HOST_SHARE * cluster.host_memory_bytes
    if profile is None:
        peak_of = None if cost_name in COSTS else name
        return Machine(model_shape(options["model"]), cost, cluster, peak_of, cluster.memory_bytes, host_bytes)
    measured = replace(
        cluster,
        gpus_per_node=profile.ranks_per_node,
        intra_node=profile.fit.intra_node,
        inter_node=profile.fit.inter_node,
    )
    if profile.device == "cpu":
        return Machine(profile.model, cost, measured, None, None, None)
    return Machine(profile.model, cost, measured, name, cluster.memory_bytes, host_bytes)


MEMORY_FIGURES = (
    "peak_memory_bytes",
    "gpu_memory_bytes",
    "host_memory_bytes",
    "host_memory_limit_bytes",
    "fits",
)
"""Keys of `memory_figures`."""


def memory_figures(machine: Machine, memory: PeakMemory) -> dict[str, Any]:
    """What the fullest GPU and its share of the host need and have, JSON-ready; `fits` is None if unknown."""
    device, host = float(memory.total_bytes.max()), float(memory.host_bytes.max())
    fits = None
    if machine.memory_bytes is not None and machine.host_bytes is not None:
        fits = device <= machine.memory_bytes and host <= machine.host_bytes
    return {
        "peak_memory_bytes": device,
        "gpu_memory_bytes": machine.memory_bytes,
        "host_memory_bytes": host,
        "host_memory_limit_bytes": machine.host_bytes,
        "fits": fits,
    }


def misfit(figures: Sequence[dict[str, Any]], name: str) -> str | None:
    """One line when GPUs or hosts called `name` hold less than the fullest of `figures` needs."""
    wrong = [f for f in figures if f["fits"] is False]
    if not wrong:
        return None
    worst = max(wrong, key=lambda f: (f["peak_memory_bytes"] > f["gpu_memory_bytes"], f["peak_memory_bytes"]))
    if worst["peak_memory_bytes"] > worst["gpu_memory_bytes"]:
        need, have = units.size(worst["peak_memory_bytes"]), units.size(worst["gpu_memory_bytes"])
        return (
            f"does not fit: the fullest GPU needs {need}, {name} GPUs have {have}; raise --tp-size or --pp-size, or "
            "lower --tokens-per-rank"
        )
    need, have = units.size(worst["host_memory_bytes"]), units.size(worst["host_memory_limit_bytes"])
    return (
        f"does not fit: offloading needs {need} of host memory a GPU, of which {have} may be used; use more ranks or a "
        "smaller --offload"
    )
