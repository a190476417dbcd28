"""Cost model, makespan, traffic and bounds against hand counts and brute force."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bytescale.cost import (
    CLUSTERS,
    MODELS,
    attention_bytes,
    attention_traffic_tokens,
    dense_flops,
    durations,
    lower_bound_s,
    makespan,
    preset_cost,
    rank_time_s,
)
from bytescale.cost.makespan import earliest_starts
from bytescale.cost.model import layer_time_s, piece_times_s
from bytescale.cost.predict import least_time_s, stage_layers
from bytescale.cost.presets import paper_constants
from bytescale.errors import UserError
from bytescale.plan.order import one_f_one_b
from bytescale.plan.step_plan import step_plan
from bytescale.plan.zigzag import piece_runs
from bytescale.planner import plan

COSTS = [dense_flops(), *(preset_cost("llama-7b", name) for name in CLUSTERS)]


def test_parameters_of_the_models() -> None:
    billions = {"llama-70b": 69.0, "mistral-8x7b": 46.7, "mistral-8x22b": 141.0}
    for name, expected in billions.items():
        assert MODELS[name].num_parameters / 1e9 == pytest.approx(expected, rel=0.03)


def test_paper_cluster_is_near_the_published_kernels_and_says_where_each_constant_comes_from() -> None:
    cost = preset_cost("llama-7b", "paper", tp_size=2)
    edge = 8192
    assert 0.7 * 2.8e-3 <= cost.forward.square_s * edge**2 <= 2.8e-3
    assert 24e-3 <= cost.forward.token_s * edge <= 31e-3  # a small micro-batch of Fig. 18b
    assert 1.4e-3 <= cost.inter_node.time_s(edge * cost.kv_bytes_per_token) <= 1.9e-3
    # 312K tokens on 39 ranks: transfers are hidden.
    attention = float(layer_time_s(cost, cost.forward, 39 * edge, 39)) - cost.forward.token_s * edge
    assert attention == pytest.approx(39 * cost.forward.square_s * edge**2, rel=1e-9)
    kinds = ("published", "fitted", "assumed")
    assert all(entry["source"].startswith(kinds) and entry["unit"] for entry in paper_constants().values())


def test_offload_study_of_the_paper() -> None:
    """64K tokens: half the activations leave for free, all of them cost about 28 %; at 256K all leave for free."""
    cost = preset_cost("llama-7b", "paper", tp_size=2)

    def slowdown(length: int, ratio: float) -> float:
        return float(rank_time_s(cost, length, length // 8192, ratio) / rank_time_s(cost, length, length // 8192))

    assert slowdown(65536, 0.5) == pytest.approx(1.0, abs=1e-9)
    assert slowdown(65536, 1.0) == pytest.approx(1.28, abs=0.03)
    assert slowdown(262144, 1.0) == pytest.approx(1.0, abs=1e-9)


def test_dense_flops_counts_nothing_else() -> None:
    cost = dense_flops()
    lengths = np.array([1, 100, 8192, 131072])
    counted = lengths * (12.0 * 4096 + lengths)
    for degree in (1, 3, 64):
        times = rank_time_s(cost, lengths, degree)
        assert np.allclose(times / times[0] * counted[0], counted)
        assert np.allclose(times * degree, rank_time_s(cost, lengths))


@pytest.mark.parametrize("cost", COSTS, ids=lambda c: c.name)
@given(length=st.integers(1, 3_000_000), degree=st.integers(1, 512))
def test_no_degree_saves_work_and_times_grow(cost, length: int, degree: int) -> None:
    time_s = float(rank_time_s(cost, length, degree))
    assert time_s * degree >= float(rank_time_s(cost, length)) * (1 - 1e-12)
    assert float(rank_time_s(cost, length + 1, degree)) > time_s


def test_a_hidden_copy_is_free_and_the_rest_is_added() -> None:
    cost = preset_cost()
    plain = piece_times_s(cost, 8192)
    copy_s = cost.activation_bytes_per_token * 8192 / cost.copy_bytes_per_s
    ratio = 0.9 * float(plain[0]) / copy_s
    assert piece_times_s(cost, 8192, 1, min(ratio, 1.0))[0] == plain[0]
    if ratio < 0.5:
        assert piece_times_s(cost, 8192, 1, 1.0)[0] == pytest.approx(copy_s)


def test_tensor_parallelism_splits_and_communicates() -> None:
    one, four = preset_cost(), preset_cost(tp_size=4)
    assert four.ranks_per_node == 2
    assert four.kv_bytes_per_token == one.kv_bytes_per_token / 4
    assert one.forward.token_s / 4 < four.forward.token_s < one.forward.token_s
    with pytest.raises(UserError, match="tp_size"):
        preset_cost(tp_size=3)
    with pytest.raises(UserError, match="did you mean 'llama-7b'"):
        preset_cost("lama-7b")


def made(strategy: str, lengths: list[int], hdp_size: int, capacity: int, pp_size: int = 1):
    return plan(
        lengths, strategy, hdp_size=hdp_size, tokens_per_rank=capacity, pp_size=pp_size, cost=dense_flops(6), seed=0
    )


lengths_and_ranks = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(3, 7))


@settings(deadline=None)
@given(problem=lengths_and_ranks, strategy=st.sampled_from(["static", "hdp-naive", "best", "fcp"]))
def test_traffic_is_what_the_ranks_send_each_other(problem: tuple[list[int], int], strategy: str) -> None:
    lengths, hdp_size = problem
    step = made(strategy, lengths, hdp_size, 20)
    pieces = step.pieces
    sent = np.zeros(hdp_size, dtype=np.int64)
    for row in range(len(pieces)):
        s, rank = int(pieces.sequence[row]), int(pieces.rank[row])
        if pieces.cp_degree is not None:
            degree, index = int(pieces.cp_degree[row]), int(pieces.cp_index[row])
            runs = piece_runs(lengths[s], degree, index)
            for ring_step in range(1, degree):
                target = (index + ring_step) % degree
                there = piece_runs(lengths[s], degree, target)
                # Nothing travels to a piece that has no query behind it.
                if target > index:
                    sent[rank] += runs.num_front_tokens if there.num_tokens else 0
                else:
                    sent[rank] += runs.num_tokens if there.num_back_tokens else 0
        else:
            later = (pieces.sequence == s) & (pieces.token_begin > pieces.token_begin[row])
            sent[rank] += pieces.tokens[row] * len(set(pieces.rank[later].tolist()) - {rank})
    assert attention_traffic_tokens(step).tolist() == sent.tolist()
    assert attention_bytes(step, 8, 5) == sent.sum() * 8 * 5 * 3
    assert attention_bytes(step, 8, 5, checkpointing=True) == sent.sum() * 8 * 5 * 4


def test_two_ranks_one_shared_sequence_by_hand() -> None:
    """Rank 0: a single, then the shared one. Rank 1: the shared one, then a single."""
    step = step_plan(
        strategy="hand",
        hdp_size=2,
        tokens_per_rank=10,
        num_layers=1,
        lengths=[3, 8, 2],
        sequence=[0, 1, 1, 2],
        rank=[0, 0, 1, 1],
        micro_batch=[0, 1, 0, 1],
        tokens=[3, 4, 4, 2],
        cp_degree=[1, 2, 2, 1],
        cp_index=[0, 0, 1, 0],
    )
    forward = np.array([[1.0], [2.0], [2.5], [0.5]])
    timeline = makespan(step, forward, 2 * forward)
    # The single takes 3, the gang of the slower member 7.5 behind it, the last single 1.5.
    assert timeline.step_time_s == pytest.approx(3 + 7.5 + 1.5)


def test_1f1b_by_brute_force() -> None:
    """One pipeline, three micro-batches, two and three stages, against an operation by operation simulation."""
    rng = np.random.default_rng(0)
    for pp_size in (2, 3):
        step = made("hdp-naive", [20, 20, 20], 1, 20, pp_size)
        forward, backward = rng.uniform(1, 3, (3, pp_size)), rng.uniform(1, 5, (3, pp_size))
        order = [list(one_f_one_b(3, pp_size, stage)) for stage in range(pp_size)]
        done: dict[tuple[int, int, int], float] = {}
        clock = [0.0] * pp_size
        while any(order):
            for stage in range(pp_size):
                if not order[stage]:
                    continue
                mb, direction = order[stage][0]
                ends = [(mb, stage - 1, 0)] if direction == 0 else [(mb, stage + 1, 1), (mb, stage, 0)]
                ends = [e for e in ends if 0 <= e[1] < pp_size]
                if all(e in done for e in ends):
                    time_s = (forward if direction == 0 else backward)[mb, stage]
                    clock[stage] = max([clock[stage], *(done[e] for e in ends)]) + time_s
                    done[mb, stage, direction] = clock[stage]
                    order[stage].pop(0)
        assert makespan(step, forward, backward).step_time_s == pytest.approx(max(clock))


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        earliest_starts(2, np.array([0, 1]), np.array([1, 0]), np.ones(2))


def test_bound_is_work_or_the_longest_sequence() -> None:
    cost = preset_cost("llama-7b", "paper")
    many = np.full(1000, 4096)
    work = float(rank_time_s(cost, many).sum()) / 8
    assert lower_bound_s(cost, many, 8) == pytest.approx(work)
    giant = np.array([2_000_000, 10])
    longest = min(float(rank_time_s(cost, 2_000_000, d)) for d in range(1, 65))
    assert lower_bound_s(cost, giant, 64) == pytest.approx(max(longest, float(rank_time_s(cost, giant).sum()) / 64))
    assert least_time_s(cost, 2_000_000, 64)[0] == pytest.approx(longest)


def test_rank_speeds_scale_durations() -> None:
    step = made("hdp-naive", [20, 20], 2, 20)
    even = durations(step, dense_flops(6)).forward_s
    uneven = durations(step, dense_flops(6), np.array([1.0, 0.5])).forward_s
    assert np.allclose(uneven, even * [[1], [2]])


def test_stages_share_layers() -> None:
    assert stage_layers(dense_flops(32), 4).tolist() == [8, 8, 8, 8]
    assert stage_layers(dense_flops(10), 4).tolist() == [3, 3, 2, 2]


@given(
    num_layers=st.integers(1, 9),
    pp_size=st.integers(1, 9),
    embedding=st.floats(0, 4),
    head=st.floats(0, 4),
)
def test_no_other_split_has_a_cheaper_dearest_stage(
    num_layers: int, pp_size: int, embedding: float, head: float
) -> None:
    assume(pp_size <= num_layers)
    cost = dense_flops(num_layers)
    layer_s = 2 * (cost.forward.token_s + cost.backward.token_s)
    forward = replace(cost.forward, embedding_token_s=embedding * layer_s, head_token_s=head * layer_s)
    chosen = stage_layers(replace(cost, forward=forward), pp_size)
    assert chosen.sum() == num_layers and chosen.min() >= 1

    def dearest(counts: Sequence[int]) -> float:
        load = np.array(counts, np.float64)
        load[0] += embedding
        load[-1] += head
        return float(load.max())

    cuts = combinations(range(1, num_layers), pp_size - 1)
    splits = (np.diff([0, *cut, num_layers]) for cut in cuts)
    assert dearest(chosen) <= min(dearest(counts) for counts in splits) * (1 + 1e-9)
