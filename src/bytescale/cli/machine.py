"""What a simulated step runs on: the model's shape, what its pieces cost, links, the GPU's peak and memory.

Presets describe all of it by two names. A profile brings its own model, cost and links; a CPU has neither a peak nor a
memory that training must fit, a GPU those of `--cluster`. `dense-flops` counts FLOPs of its own, so it has no
utilisation either.
"""

from dataclasses import dataclass, replace
from typing import Any

from bytescale.cli.planning import COSTS, chosen_cost, chosen_profile
from bytescale.cost import ClusterSpec, CostModel, ModelShape, cluster_spec, model_shape
from bytescale.report import units


@dataclass(frozen=True)
class Machine:
    """A described machine and the model on it.

    Attributes:
        model: sizes, for states, memory and FLOPs.
        cost: what pieces cost.
        cluster: links of collectives and stages; with a profile those that were measured.
        peak_of: cluster whose data-sheet peak counts; None where utilisation means nothing.
        memory_bytes: of one GPU; None on a CPU.
    """

    model: ModelShape
    cost: CostModel
    cluster: ClusterSpec
    peak_of: str | None
    memory_bytes: float | None


def described_machine(options: dict[str, Any]) -> Machine:
    """The machine of the shared options.

    Raises:
        UserError: an unknown name, or a profile that cannot be read or used.
    """
    name, cost_name = options["cluster"], options["cost_name"]
    cost = chosen_cost(options["model"], name, cost_name, options["tp_size"])
    cluster = cluster_spec(name)
    profile = chosen_profile(cost_name)
    if profile is None:
        peak_of = None if cost_name in COSTS else name
        return Machine(model_shape(options["model"]), cost, cluster, peak_of, cluster.memory_bytes)
    measured = replace(
        cluster,
        gpus_per_node=profile.ranks_per_node,
        intra_node=profile.fit.intra_node,
        inter_node=profile.fit.inter_node,
    )
    if profile.device == "cpu":
        return Machine(profile.model, cost, measured, None, None)
    return Machine(profile.model, cost, measured, name, cluster.memory_bytes)


def misfit(machine: Machine, peak_memory_bytes: float) -> str | None:
    """One line when a GPU holds less than the fullest one needs."""
    if machine.memory_bytes is None or peak_memory_bytes <= machine.memory_bytes:
        return None
    return (
        f"does not fit: the fullest GPU needs {units.size(peak_memory_bytes)}, {machine.cluster.name} GPUs have "
        f"{units.size(machine.memory_bytes)}; raise --tp-size or --pp-size, or lower --tokens-per-rank"
    )
