"""A plan as text: what people read is what is parsed, for every layout."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.cost import preset_cost
from bytescale.errors import UserError
from bytescale.plan import StepPlan, plan_from_text, plan_to_text, read_plan, write_plan
from bytescale.plan.validate import validate
from bytescale.planner import plan
from tests.plans import chunked_plans, valid_plans

BY_HAND = """
plan by-hand: tokens_per_rank=8192 num_layers=32
lengths: 16384 900 120
rank 0: 0[0/2] | 2
rank 1: 0[1/2]
rank 2: 1
rank 3:
"""


def test_a_plan_is_written_as_it_is_read() -> None:
    parsed = plan_from_text(BY_HAND)
    assert validate(parsed).idle_ranks.tolist() == [3]
    assert parsed.pieces.tokens.tolist() == [8192, 120, 8192, 900]
    assert str(parsed) == BY_HAND.strip()


@settings(deadline=None, max_examples=60)
@given(st.one_of(valid_plans(), valid_plans(pp_size=2), chunked_plans(3, 2)))
def test_round_trip(made: StepPlan) -> None:
    assert plan_from_text(plan_to_text(made)) == made


def test_round_trip_of_blocks_and_offloading() -> None:
    cost = preset_cost()
    for strategy, offload in (("fcp", "off"), ("hdp-naive", "auto"), ("best", 0.25)):
        made = plan([60000, 9000, 12], strategy, hdp_size=4, tokens_per_rank=16384, cost=cost, offload=offload)
        assert plan_from_text(plan_to_text(made)) == made


def test_plans_differ_where_one_piece_does() -> None:
    parsed = plan_from_text(BY_HAND)
    assert parsed == plan_from_text(BY_HAND)
    assert parsed != plan_from_text(BY_HAND.replace("rank 2: 1\nrank 3:", "rank 2:\nrank 3: 1"))
    assert parsed != plan_from_text(BY_HAND.replace("8192 num", "8193 num"))


def test_a_large_plan_prints_short() -> None:
    made = plan(list(range(1, 3000)), hdp_size=64, tokens_per_rank=8192, cost=preset_cost())
    shown = str(made)
    assert len(shown.splitlines()) == 2 + 16 + 1
    assert shown.splitlines()[-1] == "... 48 ranks more"
    assert "... 2983 more" in shown
    assert len(repr(made)) < 120


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a written plan has a line"),
        ("plan x:\nlengths: 3", "must say tokens_per_rank"),
        ("plan x: tokens_per_rank=ten\nlengths: 3", "tokens_per_rank of a written plan is 'ten'"),
        ("plan x: ranks=3\nlengths: 3", "has no 'ranks'"),
        ("plan x: tokens_per_rank=9 layout=rings\nlengths: 3\nrank 0: 0", "layout of a written plan is 'rings'"),
        ("plan x: tokens_per_rank=9\nlengths: a\nrank 0: 0", "line 2 of a written plan"),
        ("plan x: tokens_per_rank=9\nlengths: 3\nrank 1: 0", "must begin with `rank 0:`"),
        ("plan x: tokens_per_rank=9\nlengths: 3\nrank 0: 0 | | 0", "micro-batch 1 of rank 0"),
        ("plan x: tokens_per_rank=9\nlengths: 3\nrank 0: 1", "but there are 1 lengths"),
        ("plan x: tokens_per_rank=9\nlengths: 3\nrank 0: 0[0-2]", "a piece looks like"),
        ("plan x: tokens_per_rank=9\nlengths: 3\nrank 0: 0[0/0]", "degree 0"),
        ("plan x: tokens_per_rank=9\nlengths: 3\nrank 0: 0~1-1", "no offload ratio"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[").replace("|", r"\|")):
        plan_from_text(text)


def test_strings_are_paths(tmp_path: Path) -> None:
    made = plan_from_text(BY_HAND)
    write_plan(made, str(tmp_path / "plan.json"))
    assert read_plan(str(tmp_path / "plan.json")) == made
