"""Workloads, memory, context limits, spans, components, overheads."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.cost import Ulysses, cluster_spec, head_exchange, model_shape, preset_cost
from bytescale.cost.model import Link
from bytescale.errors import UserError
from bytescale.lengths.source import length_source
from bytescale.planner import plan as make_plan
from bytescale.simulator import (
    StepOverheads,
    collective_s,
    components,
    context_limits,
    main_loss,
    mfu,
    peak_memory,
    shares,
    simulate,
    step_figures,
    step_spans,
    stratified_batches,
)
from bytescale.simulator.memory import HOST_SHARE, layer_bytes_per_token, state_bytes
from bytescale.simulator.outcome import model_flops
from bytescale.simulator.workload import split_overlong
from bytescale.trace import trace_to_dict, write_trace
from tests.plans import drawn
from tests.simulator.plans import linear_cost, one_layer
from tests.traces import check_trace

K = 1024


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["github", "byted", "wikipedia", "wlb", "lognormal:mean=3000"]),
    num=st.integers(1, 4),
    context=st.sampled_from([32 * K, 300_000, 2048 * K]),
    seed=st.integers(0, 3),
)
def test_batches_hold_exactly_their_tokens(name: str, num: int, context: int, seed: int) -> None:
    source = length_source(name)
    batches = stratified_batches(source, num_batches=num, batch_tokens=2_500_000, context=context, seed=seed)
    assert [int(batch.sum()) for batch in batches] == [2_500_000] * num
    assert all(batch.min() >= 1 and batch.max() <= context for batch in batches)
    again = stratified_batches(source, num_batches=num, batch_tokens=2_500_000, context=context, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_the_pool_holds_rare_lengths_as_often_as_expected() -> None:
    batches = stratified_batches(
        length_source("byted"), num_batches=8, batch_tokens=32 * K * K, context=2048 * K, seed=1
    )
    pool = np.concatenate(batches)
    assert pool[pool >= 2048 * K].sum() / pool.sum() == pytest.approx(0.121, abs=0.004)


def test_overlong_sequences_are_split_in_place() -> None:
    assert split_overlong(np.array([25, 10, 3, 20]), 10).tolist() == [10, 10, 5, 10, 3, 10, 10]
    with pytest.raises(UserError):
        stratified_batches(length_source("byted"), num_batches=0, batch_tokens=1, context=1, seed=0)


def test_collectives_grow_with_bytes_and_ranks() -> None:
    link = Link(1.0, 10.0)
    assert collective_s(100.0, 1, link) == 0.0
    assert collective_s(100.0, 4, link) == 7.5 + 2.0
    assert collective_s(100.0, 5, link) == 8.0 + 3.0


def test_peak_memory_counts_micro_batches_in_flight() -> None:
    model, cost = model_shape("llama-7b"), preset_cost("llama-7b", "h100")
    plan = drawn("10 30 20", "0 | 1 | 2", "", num_layers=16, pp_size=2)
    memory = peak_memory(plan, model, cost)
    per_token = 16 * layer_bytes_per_token(model, cost)
    # The first stage holds two micro-batches at once, the last one.
    assert memory.activation_bytes[0].tolist() == pytest.approx([50 * per_token, 30 * per_token])
    assert memory.activation_bytes[1].tolist() == [0.0, 0.0]
    assert memory.state_bytes == state_bytes(model, tp_size=1, pp_size=2, hdp_size=2)
    assert np.all(memory.total_bytes > memory.state_bytes)


def test_zero1_keeps_parameters_and_gradients_whole() -> None:
    model = model_shape("llama-7b")
    zero1 = state_bytes(model, tp_size=1, pp_size=1, hdp_size=10, sharding="zero1")
    assert zero1 == pytest.approx(model.num_parameters * (6 + 1.2))


def test_context_limits_name_what_binds_and_agree_with_the_planner() -> None:
    model, cluster, cost = model_shape("llama-7b"), cluster_spec("h100"), preset_cost("llama-7b", "h100", tp_size=2)
    plain, hidden, full, again = context_limits(model, cluster, cost, hdp_size=16, tp_size=2)
    assert plain.binds == "device memory"
    assert plain.max_length < hidden.max_length <= full.max_length
    assert again.max_length > plain.max_length
    plan = make_plan(
        [plain.max_length],
        "hdp-naive",
        hdp_size=16,
        tokens_per_rank=plain.tokens_per_rank,
        cost=cost,
        offload="off",
    )
    total = peak_memory(plan, model, cost, tp_size=2).total_bytes.max()
    assert total <= cluster.memory_bytes
    assert total > 0.99 * cluster.memory_bytes
    given_c = context_limits(model, cluster, cost, hdp_size=16, tp_size=2, tokens_per_rank=4096)
    assert given_c[0].max_length == 16 * 4096
    for limit in given_c[1:]:
        make_plan([limit.max_length], "hdp-naive", hdp_size=16, tokens_per_rank=4096, cost=cost, offload="auto")


@pytest.mark.parametrize(
    ("model", "hdp_size", "tp_size", "pp_size"),
    [("llama-7b", 64, 1, 1), ("llama-70b", 8, 8, 1), ("llama-70b", 4, 8, 2), ("mistral-8x7b", 8, 8, 4)],
)
def test_an_offered_capacity_fits_real_batches(model: str, hdp_size: int, tp_size: int, pp_size: int) -> None:
    shape, cluster = model_shape(model), cluster_spec("h100")
    for recompute in (False, True):
        cost = preset_cost(model, "h100", tp_size=tp_size, recompute=recompute)
        limits = context_limits(shape, cluster, cost, hdp_size=hdp_size, tp_size=tp_size, pp_size=pp_size)
        whole = [(limits[0], "off")] if recompute else [(limits[0], "off"), (limits[2], "auto"), (limits[2], "longest")]
        for limit, offload in whole:
            capacity = limit.tokens_per_rank
            lengths = [limit.max_length] if offload == "longest" else [capacity * 3, *[capacity] * (6 * hdp_size)]
            for strategy in ("hdp-naive", "best"):
                plan = make_plan(
                    lengths,
                    strategy,
                    hdp_size=hdp_size,
                    pp_size=pp_size,
                    tokens_per_rank=capacity,
                    cost=cost,
                    offload="off" if offload == "off" else "auto",
                )
                memory = peak_memory(plan, shape, cost, tp_size=tp_size)
                assert memory.total_bytes.max() <= cluster.memory_bytes
                assert memory.host_bytes.max() <= HOST_SHARE * cluster.host_memory_bytes


def test_a_model_that_does_not_fit_is_refused() -> None:
    cost = preset_cost("llama-70b", "h100")
    with pytest.raises(UserError, match="does not fit: states take"):
        context_limits(model_shape("llama-70b"), cluster_spec("h100"), cost, hdp_size=4)


def test_ulysses_exchanges_heads_and_rings_the_rest() -> None:
    cost = linear_cost(square=0.0, link=Link(0.0, 1.0))
    plan = one_layer("8", "0[0/4]", "0[1/4]", "0[2/4]", "0[3/4]")
    all_heads = Ulysses(num_heads=4, num_kv_heads=4, query_bytes_per_token=3.0)
    step = simulate(plan, cost, ulysses=all_heads)
    # 2 tokens a rank, (3 + 1) bytes a token, three quarters leave: 6 s forward, twice that backward.
    assert step.ranks.communication_s[0, 0] == pytest.approx(6 + 12)
    few_heads = simulate(plan, cost, ulysses=Ulysses(num_heads=2, num_kv_heads=1, query_bytes_per_token=3.0))
    # (3 + 2) bytes, half leave, 5 s and 10 s; one ring step of 2 tokens with doubled KV: 4 s each way.
    assert few_heads.ranks.communication_s[0, 0] == pytest.approx(5 + 10 + 4 + 4)


def test_ulysses_runs_any_plan_with_the_heads_that_divide_its_degrees() -> None:
    cost, heads = preset_cost("llama-7b", "h100"), head_exchange(model_shape("llama-7b"))
    lengths = [200_000, 60_000, 9_000, *[700] * 40]
    for strategy in ("static", "flexsp", "hdp-balance", "chunked"):
        plan = make_plan(lengths, strategy, hdp_size=32, pp_size=2, tokens_per_rank=8192, cost=cost)
        ring, exchanged = simulate(plan, cost), simulate(plan, cost, ulysses=heads)
        alone = np.bincount(plan.micro_batch_ids(), weights=plan.pieces.cp_degree) == 1
        for direction in (0, 1):
            np.testing.assert_array_equal(
                exchanged.parts.total_s[direction][alone], ring.parts.total_s[direction][alone]
            )
    # Degrees that share no factor with the heads are rings.
    plan = drawn("30", "0[0/3]", "0[1/3]", "0[2/3]", num_layers=32)
    assert simulate(plan, cost, ulysses=heads).step_time_s == simulate(plan, cost).step_time_s


def test_ulysses_refuses_blocks() -> None:
    cost = preset_cost("llama-7b", "h100")
    plan = make_plan([30_000, 500], "fcp", hdp_size=8, tokens_per_rank=8192, cost=cost)
    with pytest.raises(UserError, match="blocks on any rank"):
        simulate(plan, cost, ulysses=head_exchange(model_shape("llama-7b")))


def test_components_add_up() -> None:
    cost = preset_cost("llama-7b", "h100")
    plan = make_plan([30000, 200, 9000], "hdp-naive", hdp_size=8, tokens_per_rank=4096, cost=cost, offload="auto")
    parts = components(plan, cost)
    np.testing.assert_allclose(parts.compute_s + parts.tensor_s + parts.communication_s + parts.copy_s, parts.total_s)
    assert parts.compute_s.min() > 0


def test_mfu_counts_the_real_squares() -> None:
    model = model_shape("llama-7b")
    plan = drawn("1000 3000", "0 | 1", num_layers=32)
    layer = model.linear_flops_per_token * 4000 + model.attention_flops_per_square * (1000**2 + 3000**2)
    assert model_flops(plan, model) == pytest.approx(3 * (32 * layer + model.head_flops_per_token * 4000))
    step = simulate(plan, linear_cost())
    assert mfu(step, model, peak_flops_per_s=1e12) == pytest.approx(model_flops(plan, model) / (12000 * 1e12))


def test_figures_of_a_step_are_plain_json() -> None:
    cost = preset_cost("llama-7b", "h100")
    plan = make_plan([30000, 200], "hdp-balance", hdp_size=8, tokens_per_rank=4096, cost=cost)
    step = simulate(plan, cost)
    figures = json.loads(json.dumps(step_figures(step, model_shape("llama-7b"), cost, cluster="h100")))
    assert 0 < figures["mfu"] < 1
    assert figures["main_loss"] == main_loss(shares(step))
    assert step_figures(step, model_shape("llama-7b"), cost, cluster="paper")["mfu"] is None


def test_spans_do_not_overlap_and_cover_the_step() -> None:
    cost = preset_cost("llama-7b", "h100")
    lengths = np.random.default_rng(0).integers(1, 9000, 60)
    plan = make_plan(lengths, "hdp-balance", hdp_size=4, tokens_per_rank=4096, cost=cost, pp_size=2)
    step = simulate(plan, cost, StepOverheads(gather_s=0.1, reduce_s=0.2, update_s=0.3, loading_s=1e9))
    spans = step_spans(step, [0, 3])
    for rank in (0, 3):
        for track in ("stage 0", "stage 1"):
            own = sorted((s for s in spans if (s.rank, s.track) == (rank, track)), key=lambda s: s.start_s)
            assert own[0].start_s == 0.0
            assert own[-1].end_s == pytest.approx(step.step_time_s)
            for before, after in pairwise(own):
                assert after.start_ns == before.end_ns
    check_trace(json.dumps(trace_to_dict(spans)))
    with pytest.raises(UserError, match="rank 4 is not in the plan"):
        step_spans(step, [4])


GOLDEN = Path(__file__).parent / "golden_trace.json"


def golden_spans() -> list[object]:
    plan = one_layer("4 3 6", "0[0/2]~0.5 | 1~0.5", "0[1/2]~0.5 | 2~0.5", pp_size=2)
    cost = linear_cost(square=0.25, link=Link(1.0, 2.0), num_layers=2, copy_bytes_per_s=0.5)
    extra = StepOverheads(
        gather_s=1.0, reduce_s=2.0, update_s=0.5, stage_link=Link(0.5, 4.0), stage_bytes_per_token=2.0
    )
    return list(step_spans(simulate(plan, cost, extra), [0, 1]))


def test_the_trace_is_the_stored_one_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(golden_spans(), path)  # type: ignore[arg-type]
    assert path.read_bytes() == GOLDEN.read_bytes()
    assert len(trace_to_dict(golden_spans())["traceEvents"]) > 20  # type: ignore[arg-type]
