"""One workload under one system of the paper, on its calibrated cluster.

A static plan gives every rank of a data-parallel group the same work, so it is folded: one rank stands for the group,
with pieces that keep the group's degree. The step time is that of the full plan at a 256th of the rows.

Invariant: equal arguments give equal steps. Cost: planning plus simulation of one batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray
from bytescale.cost.micro_batch import Ulysses
from bytescale.cost.model import CostModel
from bytescale.lengths.source import length_source
from bytescale.plan.step_plan import StepPlan
from bytescale.planner import Problem, make_plan, make_problem
from bytescale.planner.problem import Offload
from bytescale.reproduction.calibration import PaperCluster
from bytescale.simulator.engine import SimulatedStep, simulate
from bytescale.simulator.workload import stratified_batches

K = 1024
CONTEXTS = {"256K": 256 * K, "512K": 512 * K, "1M": 1024 * K, "2M": 2048 * K}
NUM_BATCHES = 20
SEED = 7


@dataclass(frozen=True)
class Workload:
    """Batches of one data set at one context."""

    data: str
    context: int
    batches: tuple[IntArray, ...]


def paper_workload(
    data: str, context: int, batch_tokens: int, num_batches: int = NUM_BATCHES, seed: int = SEED
) -> Workload:
    """The stratified pool of a named length distribution."""
    source = length_source(data)
    batches = stratified_batches(source, num_batches=num_batches, batch_tokens=batch_tokens, context=context, seed=seed)
    return Workload(data, context, tuple(batches))


def static_degree(context: int, tokens_per_rank: int, hdp_size: int) -> int:
    """Least divisor of hdp_size that holds the context."""
    return next(d for d in range(-(-context // tokens_per_rank), hdp_size + 1) if hdp_size % d == 0)


def folded_static(
    lengths: IntArray,
    *,
    context: int,
    hdp_size: int,
    tokens_per_rank: int,
    cost: CostModel,
    pp_size: int = 1,
) -> StepPlan:
    """The static plan with one rank for each data-parallel group; its degrees stay those of the group."""
    degree = static_degree(context, tokens_per_rank, hdp_size)
    problem = make_problem(
        -(-lengths // degree),
        hdp_size=hdp_size // degree,
        tokens_per_rank=tokens_per_rank,
        cost=cost,
        context=tokens_per_rank,
        pp_size=pp_size,
        offload="off",
    )
    plan = make_plan(problem, "static")
    pieces = replace(plan.pieces, cp_degree=np.full(len(plan.pieces), degree, dtype=np.int64))
    return replace(plan, lengths=lengths, pieces=pieces, predicted=None)


def folded_cost(cost: CostModel, plan: StepPlan) -> CostModel:
    """The cost model of a folded plan: its rings cross nodes where those of the group it stands for do."""
    assert plan.pieces.cp_degree is not None
    crosses = int(plan.pieces.cp_degree.max(initial=1)) > cost.ranks_per_node
    return replace(cost, intra_node=cost.inter_node) if crosses else cost


def paper_problem(cluster: PaperCluster, lengths: IntArray, context: int, offload: Offload = "off") -> Problem:
    """One batch on a cluster of the paper; block plans are allowed, since nothing is trained."""
    return make_problem(
        lengths,
        hdp_size=cluster.hdp_size,
        tokens_per_rank=cluster.tokens_per_rank,
        cost=cluster.cost,
        context=context,
        pp_size=cluster.pp_size,
        offload=offload,
        allow_blocks=True,
    )


def plan_step(
    cluster: PaperCluster, lengths: IntArray, strategy: str, context: int, offload: Offload = "off"
) -> StepPlan:
    """Plan one batch; `static` folded."""
    if strategy != "static":
        return make_plan(paper_problem(cluster, lengths, context, offload), strategy)
    return folded_static(
        lengths,
        context=context,
        hdp_size=cluster.hdp_size,
        tokens_per_rank=cluster.tokens_per_rank,
        cost=cluster.cost,
        pp_size=cluster.pp_size,
    )


def run_step(
    cluster: PaperCluster,
    lengths: IntArray,
    strategy: str,
    *,
    context: int,
    offload: Any = "off",
    ulysses: Ulysses | None = None,
) -> SimulatedStep:
    """Plan and simulate one batch; `static` runs folded."""
    plan = plan_step(cluster, lengths, strategy, context, offload)
    cost = folded_cost(cluster.cost, plan) if strategy == "static" else cluster.cost
    return simulate(plan, cost, cluster.overheads, ulysses=ulysses)


def step_times_s(cluster: PaperCluster, work: Workload, strategy: str, offload: Any = "off") -> npt.NDArray[np.float64]:
    """Step time of every batch."""
    steps = [run_step(cluster, b, strategy, context=work.context, offload=offload) for b in work.batches]
    return np.array([step.step_time_s for step in steps])
