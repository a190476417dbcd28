"""The collected inputs on which released planners abort, miscount or waste ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.cost import dense_flops, preset_cost, rank_time_s
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.planner import STRATEGIES, plan
from bytescale.planner.explain import explain_step
from tests.planner.inputs import lognormal

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]
RULES: dict[str, Any] = {
    "[65537] + 32 * [1000]": [65537] + 32 * [1000],
    "9 * [8192]": 9 * [8192],
    "8 * [7]": 8 * [7],
    "[1823777] + 20000 * [350]": [1823777] + 20000 * [350],
    "[2048] + 8 * [256]": [2048] + 8 * [256],
    "512 sequences, lognormal mean 2048 sigma 1.2 clipped to [16, 131072], seed 0": lognormal(512, 2048),
}
MUST_PLAN = ("hdp-naive", "hdp-balance", "best")


def case(name: str) -> dict[str, Any]:
    return next(c for c in CASES if c["id"] == name)


def lengths_of(c: dict[str, Any]) -> Any:
    return c["lengths"] if "lengths" in c else RULES[c["lengths_rule"]]


def planned(c: dict[str, Any], strategy: str, **more: Any) -> StepPlan:
    arguments = {
        "hdp_size": c["hdp_size"],
        "tokens_per_rank": c["tokens_per_rank"],
        "offload": c.get("offload", "auto"),
        "cost": preset_cost(),
    }
    return plan(lengths_of(c), strategy, **{**arguments, **more})


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("c", CASES, ids=[c["id"] for c in CASES])
def test_case(c: dict[str, Any], strategy: str) -> None:
    if c["id"] == "one-giant-many-tiny" and strategy == "static":
        pytest.skip("five million pieces")
    if c["expect"] == "error":
        with pytest.raises(UserError) as caught:
            planned(c, strategy)
        message = str(caught.value)
        assert "\n" not in message
        assert strategy not in MUST_PLAN or all(name in message for name in c["names"])
        return
    try:
        step = planned(c, strategy)
    except UserError:
        assert strategy not in MUST_PLAN
        return
    validate(step)


def step_s(step: StepPlan) -> float:
    assert step.predicted is not None
    return step.predicted.step_time_s


def test_any_integer_degree() -> None:
    degree = int(planned(case("non-power-of-two-ranks"), "best").sequence_degrees()[0])
    assert 1 <= degree <= 6


def test_rank_times_are_sums_over_pieces() -> None:
    # The rings of one micro-batch advance together, so with communication sums hold for micro-batches, not for pieces.
    cost = dense_flops()
    step = planned(case("ranks-12"), "best", cost=cost)
    pieces = step.pieces
    times = rank_time_s(cost, step.lengths[pieces.sequence], pieces.cp_degree, pieces.offload_ratio)
    assert step.predicted is not None
    assert np.allclose(np.bincount(pieces.rank, weights=times, minlength=12), step.predicted.rank_time_s, rtol=1e-9)


def test_exactly_full_takes_all_ranks() -> None:
    assert planned(case("exactly-full"), "best").sequence_degrees().tolist() == [8]


def test_one_short_sequence_leaves_ranks_idle() -> None:
    step = planned(case("one-short-sequence"), "best")
    assert step.sequence_degrees().tolist() == [1]
    assert len(validate(step).idle_ranks) == 7


def test_nine_full_on_eight_beats_two_rounds() -> None:
    step = planned(case("nine-full-on-eight"), "best")
    assert step_s(step) < 2 * float(rank_time_s(preset_cost(), 8192))


def test_no_padding() -> None:
    assert int(planned(case("odd-length-two-ranks"), "best").pieces.tokens.sum()) == 7


def test_hard_cap() -> None:
    assert validate(planned(case("hard-cap"), "best")).peak_tokens <= 8


def test_longest_sequence_is_named_as_the_bound() -> None:
    step = planned(case("three-scales"), "best")
    assert step.predicted is not None
    assert step.predicted.imbalance >= 1
    reason = explain_step(step, preset_cost())
    assert reason.longest == 2
    assert reason.bound_by in ("work", "longest sequence")


def test_more_ranks_than_sequences_against_the_yardstick() -> None:
    step = planned(case("more-ranks-than-sequences"), "best", cost=dense_flops())
    assert step.predicted is not None
    idle = 1 - step.predicted.rank_time_s.sum() / (step.hdp_size * step_s(step))
    assert idle <= 0.38


@pytest.mark.parametrize("cluster", ["h100", "paper"])
def test_one_giant_many_tiny(cluster: str) -> None:
    step = planned(case("one-giant-many-tiny"), "best", cost=preset_cost("llama-7b", cluster))
    assert step.predicted is not None
    assert step.predicted.imbalance <= 1.05 or step_s(step) <= 1.05 * step.predicted.lower_bound_s


def test_fair_cost() -> None:
    for cost in (preset_cost(), dense_flops()):
        assert float(rank_time_s(cost, 2048)) > 8 * float(rank_time_s(cost, 256))
