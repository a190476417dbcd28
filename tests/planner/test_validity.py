"""Every strategy, random batches: the plan passes `validate`, respects its bound, and is the same when made again."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytescale.cost import CostModel, dense_flops, preset_cost
from bytescale.errors import UserError
from bytescale.plan.file import plan_to_dict
from bytescale.plan.validate import validate
from bytescale.planner import STRATEGIES, make_problem, plan
from bytescale.planner.search.narrow import MAX_SEQUENCES, NOISE, narrowed

COSTS = {
    "dense": dense_flops(4),
    "h100": preset_cost("llama-7b", "h100"),
    "paper": preset_cost("llama-7b", "paper"),
    "a100": preset_cost("llama-70b", "a100", tp_size=4),
}
EXAMPLES = 260
SEARCHES = ("best", "chunked")
"""Strategies that plan long enough to be left out of `make test-fast` where there are many examples."""


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    hdp_size = draw(st.one_of(st.integers(1, 12), st.sampled_from([13, 16, 17, 23, 31, 47, 61, 64])))
    tokens_per_rank = draw(st.one_of(st.integers(1, 40), st.integers(41, 8192)))
    num = draw(st.integers(1, 24))
    longest = hdp_size * tokens_per_rank
    kinds = st.one_of(
        st.integers(1, min(longest, 8)),
        st.integers(1, min(longest, tokens_per_rank + 3)),
        st.integers(1, longest),
        st.just(longest),
        st.just(tokens_per_rank),
    )
    return {
        "lengths": draw(st.lists(kinds, min_size=num, max_size=num)),
        "hdp_size": hdp_size,
        "tokens_per_rank": tokens_per_rank,
        "cost": COSTS[draw(st.sampled_from(sorted(COSTS)))],
        "pp_size": draw(st.integers(1, 4)) if draw(st.booleans()) else 1,
        "offload": draw(st.sampled_from(["off", "auto", 0.0, 0.3, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "rank_speed": draw(st.sampled_from([None, "uneven"])),
    }


def made(strategy: str, problem: dict[str, object]) -> object:
    arguments = dict(problem)
    if arguments["rank_speed"] == "uneven":
        arguments["rank_speed"] = 1.0 + 0.07 * np.cos(np.arange(int(arguments["hdp_size"])))  # type: ignore[call-overload]
    return plan(strategy=strategy, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=pytest.mark.long) if s in SEARCHES else s for s in sorted(STRATEGIES)]
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=problems())
def test_every_plan_is_valid(strategy: str, problem: dict[str, object]) -> None:
    step = made(strategy, problem)
    report = validate(step)
    predicted = step.predicted
    assert predicted is not None
    assert predicted.step_time_s >= float(predicted.rank_time_s.max()) * (1 - 1e-9)
    assert len(report.num_micro_batches) == problem["hdp_size"]
    if step.layout == "zigzag" and problem["pp_size"] == 1 and problem["rank_speed"] is None:
        assert predicted.step_time_s >= predicted.lower_bound_s * (1 - 1e-9)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=problems())
def test_same_input_same_plan(strategy: str, problem: dict[str, object]) -> None:
    first, second = plan_to_dict(made(strategy, problem)), plan_to_dict(made(strategy, problem))
    for value in (first, second):
        value["predicted"].pop("planning_time_s")
    assert first == second


@pytest.mark.long
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=problems())
def test_best_is_never_worse(problem: dict[str, object]) -> None:
    steps = {}
    for strategy in STRATEGIES:
        if STRATEGIES[strategy].pipeline_only:
            continue
        try:
            step = made(strategy, {**problem, "allow_blocks": True})
        except UserError:
            assert strategy != "best"
            continue
        assert step.predicted is not None
        steps[strategy] = step.predicted.step_time_s
    # A small batch may give up what no prediction resolves, for short sequences that stay whole.
    small = len(problem["lengths"]) <= MAX_SEQUENCES and problem["pp_size"] == 1
    assert steps["best"] <= min(steps.values()) * (1 + (NOISE if small else 1e-9))


@pytest.mark.parametrize("strategy", ["static", "flexible-cp", "best"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=problems())
def test_narrowed_plans_are_valid_and_hardly_longer(strategy: str, problem: dict[str, object]) -> None:
    problem = {**problem, "pp_size": 1, "rank_speed": None}
    try:
        step = made(strategy, problem)
    except UserError:
        return
    narrow = narrowed(make_problem(**problem), step)
    validate(narrow)
    assert narrow.predicted.step_time_s <= step.predicted.step_time_s * (1 + NOISE)
    degree, before = narrow.sequence_degrees(), step.sequence_degrees()
    assert np.all((degree == before) | (degree == 1))


def test_one_token_gets_one_rank() -> None:
    step = plan([30000, 9000, 700, 12, 4096, 8192, 1], hdp_size=4, tokens_per_rank=8192, cost=COSTS["h100"])
    assert step.sequence_degrees()[[3, 6]].tolist() == [1, 1]


def test_best_returns_no_block_plan_unless_allowed() -> None:
    for seed in range(40):
        lengths = np.random.default_rng(seed).integers(1, 40_000, 5)
        cost: CostModel = COSTS["h100"]
        assert plan(lengths, hdp_size=5, tokens_per_rank=8192, cost=cost).layout == "zigzag"
