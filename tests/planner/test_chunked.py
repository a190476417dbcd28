"""Chunked long sequences: the plan, its order of operations, its memory and what it costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytescale.cost import preset_cost
from bytescale.cost.predict import durations, predict
from bytescale.cost.traffic import attention_traffic_tokens
from bytescale.plan.file import plan_from_dict, plan_to_dict
from bytescale.plan.memory import in_flight_tokens
from bytescale.plan.order import BACKWARD, FORWARD, one_f_one_b, unit_sizes_of
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.plan.validate import PlanError, validate
from bytescale.plan.zigzag import piece_positions
from bytescale.planner import plan
from bytescale.planner.explain import explain_sequences, explain_step
from bytescale.simulator import simulate

COST = preset_cost("llama-7b", "h100")
PP = 4
LENGTHS = [60_000, 9_000, *[700] * 60]


def made(lengths: Any = LENGTHS, hdp_size: int = 8, **more: Any) -> StepPlan:
    return plan(lengths, "chunked", hdp_size=hdp_size, tokens_per_rank=8192, cost=COST, pp_size=PP, **more)


def two_chunks(**changes: Any) -> StepPlan:
    """One sequence of 10 tokens in chunks [0, 6) and [6, 10) on two ranks, then 3 tokens on rank 1."""
    columns: dict[str, Any] = {
        "sequence": [0, 0, 0, 0, 1],
        "rank": [0, 1, 0, 1, 1],
        "micro_batch": [0, 0, 1, 1, 2],
        "tokens": [3, 3, 2, 2, 3],
        "cp_degree": [2, 2, 2, 2, 1],
        "cp_index": [0, 1, 0, 1, 0],
        "token_begin": [0, 0, 6, 6, 0],
        "token_end": [6, 6, 10, 10, 3],
        "lengths": [10, 3],
        "pp_size": 2,
        "tokens_per_rank": 8,
        "kept_gradient_share": 0.25,
    }
    return step_plan(strategy="hand", hdp_size=2, num_layers=2, **{**columns, **changes})


def test_long_sequences_run_in_chunks_and_the_step_is_shorter() -> None:
    step, whole = made(), plan(LENGTHS, "best", hdp_size=8, tokens_per_rank=8192, cost=COST, pp_size=PP)
    assert step.layout == "chunks"
    assert step.sequence_chunks()[0] > 1
    assert set(step.sequence_chunks()[2:]) == {1}
    assert step.predicted is not None and whole.predicted is not None
    assert step.predicted.step_time_s < 0.95 * whole.predicted.step_time_s
    validate(step)
    assert "chunks on" in explain_sequences(step, COST, 1)[0].reason
    named = explain_step(step, COST).first_sequences
    assert len(set(named)) == len(named)


def test_chunks_may_undercut_the_time_of_a_whole_sequence_but_not_that_of_one_stage() -> None:
    """Two long sequences, each in all stages at once; the bound takes the longest as running whole."""
    step = made([100_000, 100_000, 300, 5], hdp_size=13)
    assert step.layout == "chunks" and step.predicted is not None
    assert step.predicted.lower_bound_s / PP <= step.predicted.step_time_s < step.predicted.lower_bound_s


def test_without_a_pipeline_it_is_the_plan_of_best() -> None:
    arguments: dict[str, Any] = {"hdp_size": 8, "tokens_per_rank": 8192, "cost": COST}
    chunked, best = plan(LENGTHS, "chunked", **arguments), plan(LENGTHS, "best", **arguments)
    assert chunked.strategy == "chunked"
    assert plan_to_dict(chunked)["pieces"] == plan_to_dict(best)["pieces"]


def test_a_sequence_that_fits_only_offloaded_stays_whole() -> None:
    """Chunks are not offloaded by choice: the plan is that of `best`, not one that does not fit."""
    step = plan([9596], "chunked", hdp_size=1, tokens_per_rank=4798, cost=COST, pp_size=2, offload="auto")
    validate(step)
    assert step.layout == "zigzag"


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    hdp_size=st.integers(25, 40),
    pp_size=st.integers(2, 5),
    cost=st.sampled_from(["h100", "paper"]),
)
def test_every_plan_can_run_and_is_simulated_as_predicted(
    lengths: list[int], hdp_size: int, pp_size: int, cost: str
) -> None:
    model = preset_cost("llama-70b", cost, tp_size=8)
    step = plan(lengths, "chunked", hdp_size=hdp_size, tokens_per_rank=8192, cost=model, pp_size=pp_size)
    validate(step)
    assert step.predicted is not None
    assert in_flight_tokens(step).max() <= pp_size * 8192 * (1 + 1e-9)
    assert simulate(step, model).step_time_s == pytest.approx(step.predicted.step_time_s, rel=1e-9)
    whole = plan(lengths, "best", hdp_size=hdp_size, tokens_per_rank=8192, cost=model, pp_size=pp_size)
    assert whole.predicted is not None
    assert step.predicted.step_time_s <= whole.predicted.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(1, 3, 1, 2), (4,), (1, 1, 1), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("stage", range(3))
def test_backwards_of_a_unit_are_reversed_and_follow_all_its_forwards(sizes: tuple[int, ...], stage: int) -> None:
    num, longest = sum(sizes), max(sizes)
    order = one_f_one_b(num, 3, stage, sizes, longest)
    at = {operation: i for i, operation in enumerate(order)}
    assert len(at) == len(order) == 2 * num
    ends = np.cumsum(sizes).tolist()
    for end, size in zip(ends, sizes, strict=True):
        last_forward = at[end - 1, FORWARD]
        backward = [at[i, BACKWARD] for i in range(end - size, end)]
        assert last_forward < min(backward)
        assert backward == sorted(backward, reverse=True)
    held = np.cumsum([1 if direction == FORWARD else -1 for _, direction in order])
    assert held.max() <= longest + 2 - stage
    if longest == 1:
        assert order == one_f_one_b(num, 3, stage)


def test_units_are_found_and_survive_a_file() -> None:
    step = two_chunks()
    validate(step)
    assert unit_sizes_of(step) == [(2,), (2, 1)]
    again = plan_from_dict(plan_to_dict(step))
    assert plan_to_dict(again) == plan_to_dict(step)
    assert again.layout == "chunks" and again.kept_gradient_share == 0.25


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp_size": 1}, "needs a pipeline"),
        ({"token_begin": [0, 0, 5, 5, 0], "token_end": [6, 6, 9, 9, 3]}, "must follow each other"),
        ({"token_end": [6, 6, 9, 9, 3]}, "from 0 to the end"),
        ({"token_end": [6, 5, 10, 10, 3]}, "disagree on its end"),
        ({"cp_index": [0, 1, 1, 0, 0]}, "next one of the same rank"),
        ({"micro_batch": [0, 0, 1, 2, 1]}, "next one of the same rank"),
        ({"micro_batch": [1, 1, 0, 0, 2]}, "next one of the same rank"),
        ({"cp_index": [0, 0, 0, 1, 0]}, "cp_index 0..1 once each"),
        ({"tokens": [3, 3, 3, 1, 3]}, "piece 0 of 2 of 4 tokens has 2"),
        ({"kept_gradient_share": -1.0}, "kept_gradient_share is -1"),
        ({"tokens_per_rank": 4, "kept_gradient_share": 0.5}, "between forward and backward"),
    ],
)
def test_broken_chunks_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        validate(two_chunks(**changes))


def test_kept_tokens_count_until_their_backward() -> None:
    # Rank 0 holds both chunks, 3 + 2 tokens, and a quarter more for gradients; rank 1 also 3 tokens at both stages:
    # the unit of two chunks makes every stage warm up by one micro-batch more.
    held = in_flight_tokens(two_chunks())
    assert held[0].tolist() == [6.25, 6.25]
    assert held[1, 0] == pytest.approx(6.25 + 3)
    assert held[1, 1] == pytest.approx(max(6.25, 2.5 * 1.25 + 3 + 0.625))


def test_chunks_do_the_work_of_the_whole_sequence() -> None:
    # Without communication and block efficiency the chunks of a sequence take what its pieces take together.
    free = replace(
        COST,
        block_half_tokens=0.0,
        ring_step_floor_s=0.0,
        intra_node=replace(COST.intra_node, latency_s=0.0, bytes_per_s=float("inf")),
        inter_node=replace(COST.inter_node, latency_s=0.0, bytes_per_s=float("inf")),
        forward=replace(COST.forward, constant_s=0.0),
        backward=replace(COST.backward, constant_s=0.0),
    )
    both = two_chunks(sequence=[0] * 4, rank=[0, 1] * 2, micro_batch=[0, 0, 1, 1], tokens=[3, 3, 2, 2],
                      cp_degree=[2] * 4, cp_index=[0, 1] * 2, token_begin=[0, 0, 6, 6], token_end=[6, 6, 10, 10],
                      lengths=[10])  # fmt: skip
    whole = step_plan(strategy="hand", hdp_size=2, num_layers=2, tokens_per_rank=8, lengths=[10], sequence=[0, 0],
                      rank=[0, 1], micro_batch=[0, 0], tokens=[5, 5], cp_degree=[2, 2], cp_index=[0, 1],
                      pp_size=2)  # fmt: skip
    for direction in ("forward_s", "backward_s"):
        chunked_s, whole_s = (getattr(durations(p, free), direction).sum() for p in (both, whole))
        assert chunked_s == pytest.approx(whole_s, rel=1e-12)
    assert predict(both, free).step_time_s < predict(whole, free).step_time_s


def test_traffic_is_every_kept_token_and_what_causality_needs_of_the_chunk() -> None:
    step = two_chunks()
    pieces = step.pieces
    assert pieces.cp_index is not None and pieces.cp_degree is not None
    assert pieces.token_begin is not None and pieces.token_end is not None
    expected = np.zeros(2, dtype=np.int64)
    for row in range(len(pieces)):
        for other in range(len(pieces)):
            same = pieces.sequence[row] == pieces.sequence[other]
            if (
                not same
                or pieces.rank[row] == pieces.rank[other]
                or pieces.token_begin[row] > pieces.token_begin[other]
            ):
                continue
            keys, queries = (
                pieces.token_begin[i]
                + piece_positions(int(pieces.token_end[i] - pieces.token_begin[i]), 2, int(pieces.cp_index[i]))
                for i in (row, other)
            )
            expected[pieces.rank[row]] += int((keys <= queries.max()).sum())
    assert attention_traffic_tokens(step).tolist() == expected.tolist()
