"""The table of strategies: what adding one takes, and what `best` then knows of it."""

from dataclasses import replace

import numpy as np
import pytest

import bytescale.planner as planner
from bytescale.arrays import IntArray
from bytescale.cost import preset_cost
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.planner import PLAIN, STRATEGIES, Problem, Strategy, strategy_table
from bytescale.planner.parts.rows import plan_of_groups
from tests.planner.inputs import lognormal

ASKED = {"hdp_size": 4, "tokens_per_rank": 8192, "cost": preset_cost("llama-7b", "paper")}
LENGTHS = [16384, 900, 120, 3000]


def plan_all_ranks(problem: Problem) -> StepPlan:
    """Every sequence over all ranks, one micro-batch after the other: the least a strategy can do."""
    num, hdp_size = problem.num_sequences, problem.hdp_size
    return plan_of_groups(
        problem,
        "all-ranks",
        sequence=np.arange(num),
        degree=np.full(num, hdp_size),
        ranks=np.tile(np.arange(hdp_size), num),
        micro_batches=np.repeat(np.arange(num), hdp_size),
    )


def test_every_name_is_that_of_its_strategy() -> None:
    assert all(name == strategy.name and strategy.summary for name, strategy in STRATEGIES.items())
    assert tuple(STRATEGIES)[: len(PLAIN)] == tuple(strategy.name for strategy in PLAIN)


def test_a_strategy_is_a_function_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    added = Strategy("all-ranks", "every sequence over all ranks", plan_all_ranks)
    monkeypatch.setattr(planner, "STRATEGIES", strategy_table((*PLAIN, added)))
    step = planner.plan(LENGTHS, "all-ranks", **ASKED)
    origin = step.origin
    validate(step)
    assert (step.strategy, origin) == ("all-ranks", "all-ranks")
    assert step.predicted is not None and step.predicted.planning_time_s > 0
    assert "all-ranks" in planner.STRATEGIES and "all-ranks" not in STRATEGIES


def test_best_takes_the_plan_of_an_added_strategy_that_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = next(lengths for seed in range(60) if planner.plan(lengths := few(seed), **ASKED).origin != "best")
    step = planner.plan(lengths, **ASKED)
    origin = step.origin
    winner = STRATEGIES[origin]
    added = Strategy("added", winner.summary, lambda problem: replace(winner.plan(problem), strategy="added"))
    others = [strategy for strategy in PLAIN if strategy is not winner]
    monkeypatch.setattr(planner, "STRATEGIES", strategy_table((*others, added)))
    again = planner.plan(lengths, **ASKED)
    made_by = again.origin
    assert (again.strategy, made_by) == ("best", "added")
    assert again.predicted is not None and step.predicted is not None
    assert again.predicted.step_time_s == step.predicted.step_time_s


def few(seed: int) -> IntArray:
    return lognormal(2 + seed % 11, 8192, seed=seed, high=32768)


def test_a_strategy_that_refuses_is_no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: Problem) -> StepPlan:
        raise UserError("not these")

    monkeypatch.setattr(planner, "STRATEGIES", strategy_table((*PLAIN, Strategy("refuses", "nothing", refuse))))
    validate(planner.plan(LENGTHS, **ASKED))
    with pytest.raises(UserError, match="not these"):
        planner.plan(LENGTHS, "refuses", **ASKED)
