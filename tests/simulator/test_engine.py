"""Timelines computed by hand, conservation over random plans, agreement with the planner's prediction."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.cost import cluster_spec, model_shape, preset_cost
from bytescale.cost.model import Link
from bytescale.cost.predict import predict
from bytescale.lengths.source import length_source
from bytescale.planner import plan as make_plan
from bytescale.simulator import StepOverheads, shares, simulate, step_overheads, step_spans, stratified_batches
from tests.plans import drawn
from tests.simulator.plans import linear_cost, one_layer


def test_one_rank_runs_its_micro_batches_one_after_another() -> None:
    step = simulate(one_layer("10 4", "0 | 1"), linear_cost())
    assert step.step_time_s == 42.0
    assert step.operations.start_s[0, :, 0].tolist() == [0.0, 30.0]
    assert step.operations.end_s[1, :, 0].tolist() == [30.0, 42.0]
    assert step.ranks.compute_s.tolist() == [[42.0]]
    assert step.ranks.dp_bubble_s.tolist() == [[0.0]]


def test_two_ranks_share_a_sequence() -> None:
    # 5 tokens a rank; one ring step of 3 s + 5 bytes / (1 byte/s) = 8 s, of which 0 s are hidden: no attention.
    cost = linear_cost(link=Link(3.0, 1.0))
    step = simulate(one_layer("10", "0[0/2]", "0[1/2]"), cost)
    assert step.step_time_s == (5 + 8) + (10 + 8)
    assert step.ranks.communication_s[:, 0].tolist() == [16.0, 16.0]
    assert step.ranks.transfer_s[:, 0].tolist() == [16.0, 16.0]


def test_a_ring_step_takes_the_larger_of_compute_and_transfer() -> None:
    # Blocks of 5 tokens: 0.4 * 25 = 10 s forward, 20 s backward; transfer 13 s.
    cost = linear_cost(square=0.4, link=Link(8.0, 1.0))
    step = simulate(one_layer("10", "0[0/2]", "0[1/2]"), cost)
    forward, backward = 5 + 10 + 13, 10 + 20 + 20
    assert step.step_time_s == forward + backward
    assert step.ranks.communication_s[0, 0] == 3.0


def test_the_floor_of_a_ring_step() -> None:
    cost = linear_cost(link=Link(0.0, 1e9), floor_s=4.0)
    step = simulate(one_layer("10", "0[0/2]", "0[1/2]"), cost)
    assert step.step_time_s == pytest.approx((5 + 4) + (10 + 4))


def test_rings_of_one_micro_batch_advance_together() -> None:
    # Two sequences over the same two ranks pay one step, not two.
    cost = linear_cost(link=Link(8.0, 1.0))
    step = simulate(one_layer("10 6", "0[0/2] 1[0/2]", "0[1/2] 1[1/2]"), cost)
    assert step.step_time_s == (8 + 8 + 8) + (16 + 8 + 8)


def test_a_gang_waits_for_its_last_member() -> None:
    plan = one_layer("10 8 1", "0 | 1[0/2]", "1[1/2] | 2")
    step = simulate(plan, linear_cost())
    # Rank 1 waits 30 s for rank 0, both run 4 tokens, then rank 1 runs one more.
    assert step.step_time_s == 30 + 12 + 3
    assert step.ranks.gang_wait_s[:, 0].tolist() == [0.0, 30.0]
    assert step.ranks.dp_bubble_s[:, 0].tolist() == [3.0, 0.0]


def test_a_gang_lasts_as_long_as_its_slowest_member() -> None:
    plan = one_layer("8 5", "0[0/2]", "0[1/2] 1")
    step = simulate(plan, linear_cost())
    assert step.step_time_s == 27.0
    assert step.ranks.gang_wait_s[:, 0].tolist() == [15.0, 0.0]


def test_1f1b_with_two_stages_and_three_micro_batches() -> None:
    # Forward 1 s, backward 2 s a stage: F0 F1 | B0 F2 | B1 | B2 on stage 0.
    plan = one_layer("1 1 1", "0 | 1 | 2", pp_size=2)
    step = simulate(plan, linear_cost(num_layers=2))
    start = step.operations.start_s
    assert start[0, :, 1].tolist() == [1.0, 4.0, 7.0]
    assert start[1, :, 1].tolist() == [2.0, 5.0, 8.0]
    assert start[0, :, 0].tolist() == [0.0, 1.0, 6.0]
    assert start[1, :, 0].tolist() == [4.0, 7.0, 10.0]
    assert step.step_time_s == 12.0
    assert step.ranks.pp_bubble_s.tolist() == [[3.0, 3.0]]


def test_unequal_counts_of_micro_batches() -> None:
    plan = one_layer("1 1 1 5", "0 | 1 | 2", "3", pp_size=2)
    step = simulate(plan, linear_cost(num_layers=2))
    # One micro-batch of 5 tokens crosses: 5 + 5 + 10 + 10 = 30 s; the other pipeline is done after 12 s.
    assert step.step_time_s == 30.0
    assert step.ranks.dp_bubble_s.tolist() == [[18.0, 18.0], [0.0, 0.0]]
    assert step.ranks.pp_bubble_s[1].tolist() == [15.0, 15.0]


def test_hidden_states_travel_between_stages() -> None:
    plan = one_layer("4", "0", pp_size=2)
    extra = StepOverheads(stage_link=Link(1.0, 2.0), stage_bytes_per_token=3.0)
    step = simulate(plan, linear_cost(num_layers=2), extra)
    assert step.step_time_s == 4 + 7 + 4 + 8 + 7 + 8


def test_copies_hide_behind_compute_or_are_exposed() -> None:
    plan = one_layer("8", "0~0.5")
    hidden = simulate(plan, linear_cost(copy_bytes_per_s=1.0))
    assert hidden.step_time_s == 24.0
    assert hidden.ranks.d2h_s.tolist() == [[4.0]]
    exposed = simulate(plan, linear_cost(copy_bytes_per_s=0.25))
    # 16 s of copies against 8 s forward and 16 s backward.
    assert exposed.step_time_s == 16 + 16
    assert exposed.ranks.copy_s.tolist() == [[8.0]]


def test_fixed_parts_of_a_step_and_what_prefetching_hides() -> None:
    plan = one_layer("1", "0")
    extra = StepOverheads(gather_s=1.0, reduce_s=2.0, update_s=3.0, loading_s=4.0, planning_s=6.0)
    assert simulate(plan, linear_cost(), extra).step_time_s == 3 + 6 + 1
    without = StepOverheads(loading_s=4.0, planning_s=6.0, prefetch=False)
    assert simulate(plan, linear_cost(), without).step_time_s == 3 + 10


def test_an_idle_rank_waits_the_whole_step() -> None:
    step = simulate(one_layer("2", "", "0", ""), linear_cost())
    assert step.ranks.dp_bubble_s[:, 0].tolist() == [6.0, 0.0, 6.0]


def test_a_slower_rank_takes_longer() -> None:
    step = simulate(one_layer("2 2", "0", "1"), linear_cost(), rank_speed=np.array([0.5, 1.5]))
    assert step.ranks.compute_s[:, 0].tolist() == [12.0, 4.0]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    strategy=st.sampled_from(
        ["static", "hdp-naive", "hdp-balance", "megatron-hybrid", "megatron-dynamic", "flexible-cp", "best"]
    ),
    pp_size=st.sampled_from([1, 1, 2, 3]),
    offload=st.sampled_from(["off", "auto"]),
    bare=st.booleans(),
)
def test_every_second_of_every_rank_is_accounted_for(
    lengths: list[int], strategy: str, pp_size: int, offload: str, bare: bool
) -> None:
    cost = preset_cost("llama-7b", "h100")
    plan = make_plan(
        lengths, strategy, hdp_size=8, tokens_per_rank=512, cost=cost, pp_size=pp_size, offload=offload, context=4096
    )
    extra = StepOverheads()
    if not bare:
        extra = step_overheads(model_shape("llama-7b"), cluster_spec("h100"), hdp_size=8, pp_size=pp_size, update_s=0.1)
    step = simulate(plan, cost, extra)
    ranks = step.ranks
    idle = ranks.gang_wait_s + ranks.pp_bubble_s + ranks.dp_bubble_s
    fixed = extra.gather_s + extra.reduce_s + extra.update_s + step.exposed_input_s
    np.testing.assert_allclose(ranks.busy_s + idle + fixed, step.step_time_s, rtol=1e-9)
    for table in (ranks.compute_s, ranks.tensor_s, ranks.communication_s, ranks.copy_s, idle):
        assert table.min() >= -1e-9 * step.step_time_s
    for resource in (ranks.transfer_s, ranks.d2h_s, ranks.h2d_s):
        assert np.all(resource <= step.makespan_s * (1 + 1e-9))
    assert sum(vars(shares(step)).values()) == pytest.approx(1.0)
    if bare:
        assert step.step_time_s == predict(plan, cost).step_time_s
        assert plan.predicted is not None
        assert step.step_time_s == plan.predicted.step_time_s


def test_collectives_of_tensor_parallelism_are_told_apart() -> None:
    """4 of 7/8 of a hidden state a layer and direction; the recomputed forward again in the backward."""
    plan = drawn("4096 100", "0[0/2] 1", "0[1/2]", num_layers=32)
    for recompute in (False, True):
        cost = preset_cost("llama-7b", "h100", tp_size=8, recompute=recompute)
        step = simulate(plan, cost)
        hidden_s = 4096 * 2 * 7 / 8 / cost.intra_node.bytes_per_s
        expected = 32 * 4 * hidden_s * np.array([2148, 2048]) * (3 if recompute else 2)
        np.testing.assert_allclose(step.ranks.tensor_s[:, 0], expected)
        spans = [span for span in step_spans(step, [0, 1]) if span.category == "tensor"]
        assert len(spans) == 4
        assert sum(span.duration_s for span in spans) == pytest.approx(expected.sum(), rel=1e-3)
    assert simulate(plan, preset_cost("llama-7b", "h100")).ranks.tensor_s.max() == 0


def test_block_plans_run_too() -> None:
    cost = preset_cost("llama-7b", "h100")
    plan = make_plan([40000, 9000, 300, 200], "fcp", hdp_size=8, tokens_per_rank=8192, cost=cost)
    step = simulate(plan, cost)
    assert plan.layout == "blocks"
    assert plan.predicted is not None
    assert step.step_time_s == plan.predicted.step_time_s
    total = step.ranks.busy_s + step.ranks.gang_wait_s + step.ranks.dp_bubble_s
    np.testing.assert_allclose(total, step.step_time_s)


def test_twelve_thousand_pipelines_of_eight_stages_take_seconds() -> None:
    cost = preset_cost("llama-70b", "h100", tp_size=8)
    lengths = stratified_batches(
        length_source("github"), num_batches=1, batch_tokens=32 * 2**20, context=2**21, seed=1
    )[0]
    plan = make_plan(lengths, "hdp-balance", hdp_size=12_288, tokens_per_rank=8192, cost=cost, pp_size=8)
    extra = step_overheads(model_shape("llama-70b"), cluster_spec("h100"), hdp_size=12_288, tp_size=8, pp_size=8)
    begin_s = time.perf_counter()
    step = simulate(plan, cost, extra)
    assert time.perf_counter() - begin_s < 10
    assert step.ranks.compute_s.shape == (12_288, 8)
    assert simulate(plan, cost, extra).step_time_s == step.step_time_s
