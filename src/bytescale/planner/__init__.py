"""Decisions: from sequence lengths to a step plan, for anyone's trainer. numpy alone.

    from bytescale.cost import preset_cost
    from bytescale.planner import plan

    step = plan([16384, 900, 120], "hdp-naive", hdp_size=4, tokens_per_rank=8192, cost=preset_cost("llama-7b", "h100"))
    for rows in step.micro_batch_rows(rank=0):
        print(step.pieces.sequence[rows], step.pieces.tokens[rows])
    print(step.predicted.step_time_s, step.predicted.lower_bound_s)

`plan(lengths, ...)` is `make_plan(make_problem(lengths, ...))`; take the two where one question is put to several
strategies. A strategy is a pure function from a checked `Problem` to a `StepPlan`. Equal input and seed give an equal
plan. Every plan passes `bytescale.validate.validate`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy.typing as npt

from bytescale.cost.model import CostModel
from bytescale.cost.predict import predict
from bytescale.errors import UserError, nearest
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.problem import OFFLOAD_CAP, Offload, Problem, make_problem
from bytescale.planner.strategies.best import plan_best
from bytescale.planner.strategies.chunked import plan_chunked
from bytescale.planner.strategies.fcp import plan_fcp
from bytescale.planner.strategies.flexible_cp import plan_flexible
from bytescale.planner.strategies.flexsp import plan_flexsp
from bytescale.planner.strategies.hdp_balance import plan_balance
from bytescale.planner.strategies.hdp_naive import plan_naive
from bytescale.planner.strategies.megatron_dynamic import plan_dynamic
from bytescale.planner.strategies.megatron_hybrid import plan_hybrid
from bytescale.planner.strategies.static import plan_static, static_bound_s
from bytescale.planner.strategies.wlb_llm import plan_wlb
from bytescale.planner.strategy import Strategy

PLAIN = (
    Strategy(
        "static",
        "one cp_degree for all, packs in arrival order (Megatron-LM, MegaScale)",
        plan_static,
        bound_s=static_bound_s,  # its plans can have millions of pieces
    ),
    Strategy(
        "megatron-hybrid",
        "powers of two by length, one sequence at a time, balanced by squares (Megatron-LM 0.19)",
        plan_hybrid,
    ),
    Strategy(
        "megatron-dynamic",
        "powers of two that raise the largest work least, packed (Megatron-LM development branch)",
        plan_dynamic,
    ),
    Strategy("hdp-naive", "fewest ranks per sequence, best-fit packs, no balance (ByteScale, Algorithm 1)", plan_naive),
    Strategy(
        "hdp-balance",
        "the same, balanced: DP-Balance, with a pipeline PP-Balance (ByteScale, Algorithm 2)",
        plan_balance,
    ),
    Strategy("fcp", "fixed blocks on any rank (flexible context parallelism by blocks)", plan_fcp, makes_blocks=True),
    Strategy(
        "flexible-cp",
        "best-fit groups, integer degrees that minimise the slowest (flexible context parallelism)",
        plan_flexible,
    ),
    Strategy("flexsp", "groups of different powers of two, the slowest as fast as can be (FlexSP)", plan_flexsp),
    Strategy("wlb-llm", "one cp_degree for all, packs of equal work, cut or whole (WLB-LLM)", plan_wlb),
)
"""Strategies that look at no other, in the order of every table; a new one is a file in `strategies` and an entry."""


def strategy_table(plain: Sequence[Strategy]) -> Mapping[str, Strategy]:
    """Strategies by name: `plain`, and the searches, which choose among them too."""
    searches = (
        Strategy(
            "best",
            "ours: degrees, gaps and packs searched together, never worse than the others",
            lambda problem: plan_best(problem, plain),
        ),
        Strategy(
            "chunked",
            "best, and in a pipeline long sequences in chunks that keep keys and values",
            lambda problem: plan_chunked(problem, plan_best(problem, plain)),
            pipeline_only=True,
        ),
    )
    return MappingProxyType({strategy.name: strategy for strategy in (*plain, *searches)})


STRATEGIES = strategy_table(PLAIN)
"""Every strategy by its name."""

__all__ = ["PLAIN", "STRATEGIES", "Problem", "Strategy", "make_plan", "make_problem", "plan", "strategy_table"]


def make_plan(problem: Problem, strategy: str = "best") -> StepPlan:
    """Answer a checked question.

    Returns:
        A valid plan with `predicted` filled; `origin` names the strategy whose plan it is, where a search returned
        another one's.

    Raises:
        UserError: an unknown strategy, or one that cannot place this batch.
    """
    begin_s = time.perf_counter()
    if strategy not in STRATEGIES:
        raise UserError(f"unknown strategy {strategy!r}; {nearest(strategy, STRATEGIES)}")
    step_plan = STRATEGIES[strategy].plan(problem)
    predicted = step_plan.predicted or predict(step_plan, problem.cost, rank_speed=problem.rank_speed)
    timed = replace(predicted, planning_time_s=time.perf_counter() - begin_s)
    return replace(step_plan, strategy=strategy, origin=step_plan.strategy, predicted=timed)


def plan(
    lengths: Sequence[int] | npt.ArrayLike,
    strategy: str = "best",
    *,
    hdp_size: int,
    tokens_per_rank: int,
    cost: CostModel,
    context: int | None = None,
    pp_size: int = 1,
    offload: Offload = "auto",
    offload_cap: float = OFFLOAD_CAP,
    seed: int = 0,
    rank_speed: Sequence[float] | npt.ArrayLike | None = None,
    allow_blocks: bool = False,
) -> StepPlan:
    """Place one global batch: `make_plan` of `make_problem`, whose arguments these are.

    Raises:
        UserError: bad input, or a sequence that no set of ranks can hold.
    """
    problem = make_problem(
        lengths,
        hdp_size=hdp_size,
        tokens_per_rank=tokens_per_rank,
        cost=cost,
        context=context,
        pp_size=pp_size,
        offload=offload,
        offload_cap=offload_cap,
        seed=seed,
        rank_speed=rank_speed,
        allow_blocks=allow_blocks,
    )
    return make_plan(problem, strategy)
