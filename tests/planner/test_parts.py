"""The parts of the planner against plain one-by-one implementations."""

import heapq
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.cost import dense_flops, preset_cost
from bytescale.cost.model import layer_time_s
from bytescale.errors import UserError
from bytescale.plan.memory import resident_tokens
from bytescale.planner.parts.degrees import (
    least_ratio,
    least_work_degrees,
    paper_degrees,
    stage_time_s,
    widen,
)
from bytescale.planner.parts.levels import stack_gangs
from bytescale.planner.parts.list_scheduling import fill_rooms, place_gangs, place_gangs_in_gaps, place_singles
from bytescale.planner.parts.micro_batches import first_fit_in_segments
from bytescale.planner.parts.packing import best_fit, next_fit
from bytescale.planner.problem import Problem, make_problem
from bytescale.planner.strategies.fcp import plan_fcp
from tests.planner.inputs import lognormal

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(items=sizes)
def test_next_fit_keeps_order(items: list[int]) -> None:
    expected, number, used = [], 0, 0
    for size in items:
        if used and used + size > 50:
            number, used = number + 1, 0
        used += size
        expected.append(number)
    assert next_fit(np.array(items), 50).tolist() == expected


@given(items=sizes)
def test_best_fit_takes_the_longest_that_fits(items: list[int]) -> None:
    pack = best_fit(np.array(items), 50)
    left, number = sorted(items, reverse=True), 0
    expected = []
    while left:
        room, chosen = 50, []
        for size in list(left):
            if size <= room:
                room -= size
                chosen.append(size)
                left.remove(size)
        expected.append(sorted(chosen))
        number += 1
    assert [sorted(np.array(items)[pack == k].tolist()) for k in range(number)] == expected


@given(items=sizes, segments=st.integers(1, 4))
def test_first_fit_decreasing_in_segments(items: list[int], segments: int) -> None:
    values = np.array(items)
    segment = np.arange(len(items)) % segments
    pack = first_fit_in_segments(segment, values, 50)
    for s in range(segments):
        rooms: list[int] = []
        for i in sorted(np.flatnonzero(segment == s), key=lambda k: (-items[k], k)):
            at = next((k for k, room in enumerate(rooms) if room >= items[i]), len(rooms))
            if at == len(rooms):
                rooms.append(50)
            rooms[at] -= items[i]
            assert pack[i] == at


@given(times=st.lists(st.floats(0.1, 9), min_size=1, max_size=80), bins=st.integers(1, 9))
def test_fill_rooms_is_longest_first_list_scheduling(times: list[float], bins: int) -> None:
    chosen, room = fill_rooms(np.array(times), np.zeros(bins))
    heap = [0.0] * bins
    for t in sorted(times, reverse=True):
        heapq.heapreplace(heap, heap[0] + t)
    assert np.allclose(np.sort(-room), np.sort(heap), rtol=1e-12)
    assert np.allclose(np.bincount(chosen, weights=times, minlength=bins), -room, rtol=1e-9)


def _one_by_one(degree: list[int], time_s: list[float], hdp_size: int) -> float:
    ready = [0.0] * hdp_size
    for g in sorted(range(len(degree)), key=lambda k: (-time_s[k], k)):
        ready.sort()
        finish = ready[degree[g] - 1] + time_s[g]
        ready[: degree[g]] = [finish] * degree[g]
    return max(ready)


@given(
    gangs=st.lists(st.tuples(st.integers(1, 6), st.floats(0.5, 9)), min_size=1, max_size=40),
    hdp_size=st.integers(6, 17),
)
def test_batches_give_the_one_by_one_timeline(gangs: list[tuple[int, float]], hdp_size: int) -> None:
    degree, time_s = [d for d, _ in gangs], [t for _, t in gangs]
    timeline = place_gangs(np.array(degree), np.array(time_s), hdp_size)
    assert math.isclose(timeline.ready_s.max(), _one_by_one(degree, time_s, hdp_size), rel_tol=1e-12)


@pytest.mark.parametrize("place", [place_gangs, place_gangs_in_gaps])
@settings(deadline=None)
@given(
    gangs=st.lists(st.tuples(st.integers(1, 6), st.floats(0.5, 9)), min_size=1, max_size=30),
    singles=st.lists(st.floats(0.1, 3), max_size=40),
    hdp_size=st.integers(6, 12),
)
def test_timelines_never_overlap(place, gangs, singles, hdp_size) -> None:
    degree, time_s = np.array([d for d, _ in gangs]), np.array([t for _, t in gangs])
    timeline = place(degree, time_s, hdp_size)
    owner = np.repeat(np.arange(len(degree)), degree)
    spans = [
        (int(r), float(timeline.start_s[g]), float(timeline.start_s[g] + time_s[g]))
        for g, r in zip(owner, timeline.ranks, strict=True)
    ]
    for g in range(len(degree)):
        assert len(set(timeline.ranks[owner == g].tolist())) == degree[g]
    for rank in range(hdp_size):
        mine = sorted((b, e) for r, b, e in spans if r == rank)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))
        free = zip(timeline.gap_rank, timeline.gap_begin_s, timeline.gap_end_s, strict=True)
        gaps = [(b, e) for r, b, e in free if r == rank and e > b + 1e-9]
        assert all(gap_e <= b + 1e-9 or gap_b >= e - 1e-9 for b, e in mine for gap_b, gap_e in gaps)
    placed = place_singles(timeline, np.array(singles), hdp_size)
    filled = np.bincount(placed.bins, weights=singles, minlength=hdp_size + len(timeline.gap_rank))
    width = timeline.gap_end_s - timeline.gap_begin_s
    assert np.all(filled[hdp_size:] <= width + 1e-9)
    assert math.isclose(placed.step_s, float((timeline.ready_s + filled[:hdp_size]).max()), rel_tol=1e-9)


@given(degrees=st.lists(st.integers(1, 9), min_size=1, max_size=30), hdp_size=st.integers(9, 14))
def test_stacked_gangs_have_one_number_on_all_ranks(degrees: list[int], hdp_size: int) -> None:
    placed = stack_gangs(np.array(degrees), hdp_size)
    ranks, micro_batches, counts = placed.ranks, placed.micro_batches, placed.counts
    owner = np.repeat(np.arange(len(degrees)), degrees)
    for g in range(len(degrees)):
        assert len(set(micro_batches[owner == g].tolist())) == 1
        assert len(set(ranks[owner == g].tolist())) == degrees[g]
    for rank in range(hdp_size):
        assert sorted(micro_batches[ranks == rank].tolist()) == list(range(counts[rank]))


def problem(
    lengths: Any, *, offload: Any = "auto", hdp_size: int = 64, cluster: str = "paper", **others: Any
) -> Problem:
    cost = preset_cost("llama-7b", cluster)
    return make_problem(lengths, hdp_size=hdp_size, tokens_per_rank=8192, cost=cost, offload=offload, **others)


@pytest.mark.parametrize("cap", [1.5, 3.0, math.inf])
@pytest.mark.parametrize("length", [100, 8192, 8193, 12000, 16384, 30000, 65536, 262144, 400000])
def test_equation_3_against_a_search_over_ratios(length: int, cap: float) -> None:
    asked = problem([length], offload_cap=cap)
    choice = paper_degrees(asked)
    degree, ratio = int(choice.degree[0]), float(choice.offload_ratio[0])
    layers, capacity = asked.num_layers, asked.tokens_per_rank
    compute = float(layer_time_s(asked.cost, asked.cost.forward, length))
    copy = asked.cost.activation_bytes_per_token * length / asked.cost.copy_bytes_per_s
    low = min(1.0, layers * capacity / ((layers - 2) * length))
    allowed = [r for r in np.linspace(0, 1, 100_001) if r * copy <= compute and r >= low]
    fewest = -(-length // capacity)
    for r in allowed:
        needed = math.ceil((2 + (1 - r) * (layers - 2)) * length / (layers * capacity) - 1e-9)
        fewest = min(fewest, max(needed, math.ceil(length / (cap * capacity)), 1))
    # A piece is a whole number of tokens, which may cost one rank more than the real-valued formula.
    assert fewest <= degree <= fewest + 1
    tokens = np.array([-(-length // degree)])
    assert resident_tokens(tokens, np.array([ratio]), layers)[0] <= capacity * (1 + 1e-9)
    assert ratio * copy <= compute * (1 + 1e-9)


@pytest.mark.parametrize("cap", [0.5, -1, math.nan, True, "2"])
def test_a_cap_below_one_is_refused(cap: Any) -> None:
    with pytest.raises(UserError, match=r"offload_cap is .*; it is a multiple of tokens_per_rank, at least 1"):
        problem([100], offload_cap=cap)


def test_least_ratio_is_tight() -> None:
    asked = problem([8193, 20000, 65536])
    degree = np.array([1, 2, 5])
    ratio = least_ratio(asked, asked.lengths, degree)
    held = resident_tokens(-(-asked.lengths // degree), ratio, asked.num_layers)
    assert np.allclose(held, asked.tokens_per_rank)


def test_a_sequence_beyond_all_ranks_is_offloaded_as_far_as_needed() -> None:
    asked = problem([100_000], hdp_size=8)
    for choice in (paper_degrees(asked), least_work_degrees(asked)):
        assert choice.degree.tolist() == [8]
        assert 0 < choice.offload_ratio[0] <= 1


def test_widening_meets_the_target_with_the_fewest_ranks() -> None:
    asked = problem(lognormal(200, 8192), offload="off", cluster="h100")
    least = least_work_degrees(asked).degree
    zero = np.zeros(len(least))
    target = float(np.median(stage_time_s(asked, asked.lengths, least, zero)))
    wide = widen(asked, least, target)
    time_s = stage_time_s(asked, asked.lengths, wide, zero)
    narrower = stage_time_s(asked, asked.lengths, np.maximum(wide - 1, 1), zero)
    grown = wide > least
    met = time_s <= target
    assert np.all(wide >= least)
    assert np.all(narrower[grown & met] > target)
    every = np.stack([stage_time_s(asked, asked.lengths, np.full_like(least, d), zero) for d in range(1, 65)])
    assert np.all(time_s[~met] <= every.min(axis=0)[~met] * 1.0021)


def test_dense_cost_has_no_communication() -> None:
    cost = dense_flops()
    degree = np.arange(1, 65)
    assert np.allclose(
        layer_time_s(cost, cost.forward, 65536, degree) * degree, layer_time_s(cost, cost.forward, 65536)
    )


def test_waves_of_blocks_are_filled_in_order_of_length() -> None:
    asked = problem(lognormal(400, 8192), offload="off", hdp_size=16)
    wave = plan_fcp(asked).pieces
    number = np.zeros(asked.num_sequences, dtype=np.int64)
    number[wave.sequence] = wave.micro_batch
    by_length = number[np.argsort(-asked.lengths, kind="stable")]
    assert number.max() > 3
    # One wave after another, each a stretch of the sorted lengths; which runs first does not matter.
    assert np.count_nonzero(np.diff(by_length)) == number.max()
