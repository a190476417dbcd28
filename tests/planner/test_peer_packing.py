"""`flexsp` against all groups of a small micro-batch; `wlb-llm` against its own promises of work and memory."""

from itertools import combinations_with_replacement

import numpy as np

from bytescale.cost import preset_cost
from bytescale.plan.validate import validate
from bytescale.planner import Problem, make_plan, make_problem
from bytescale.planner.strategies.flexsp import Buckets, buckets_of, solve_micro_batches
from bytescale.planner.strategies.static import static_degree
from bytescale.planner.strategies.wlb_llm import balanced_packs
from tests.planner.inputs import lognormal

CAPACITY = 8192


def problem(lengths: object, hdp_size: int, **more: object) -> Problem:
    cost = preset_cost("llama-7b", "h100")
    asked = {"hdp_size": hdp_size, "tokens_per_rank": CAPACITY, "cost": cost, "offload": "off", **more}
    return make_problem(lengths, **asked)  # type: ignore[arg-type]


def least_longest_s(buckets: Buckets, hdp_size: int) -> float:
    """Longest time of the best groups of any sizes, by trying all, of one micro-batch; infinite where none holds."""
    work, tokens = (np.repeat(a[:, 0].T, buckets.counts[0], axis=1) for a in (buckets.work_s, buckets.tokens))
    best = float("inf")
    for num in range(1, min(hdp_size, work.shape[1]) + 1):
        for kinds in combinations_with_replacement(range(len(buckets.sizes)), num):
            if buckets.sizes[list(kinds)].sum() > hdp_size:
                continue
            states = {((0.0,) * num, (0,) * num)}
            for i in range(work.shape[1]):
                grown = set()
                for busy, held in states:
                    for g, kind in enumerate(kinds):
                        longer, fuller = busy[g] + work[kind, i], held[g] + int(tokens[kind, i])
                        if longer < best and fuller <= CAPACITY:
                            grown.add(((*busy[:g], longer, *busy[g + 1 :]), (*held[:g], fuller, *held[g + 1 :])))
                states = grown
            best = min([best, *(max(busy) for busy, _ in states)])
    return best


def test_flexsp_is_near_the_best_groups_of_a_small_micro_batch() -> None:
    ratios = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths = np.sort(rng.integers(200, 9_000, size=5))[::-1].copy()
        buckets = buckets_of(problem(lengths, 4), lengths, np.zeros(5, dtype=np.int64))
        groups = solve_micro_batches(buckets, CAPACITY, np.zeros(1, dtype=np.int64))
        least = least_longest_s(buckets, 4)
        longest_s = float(groups.longest_s[0])
        if np.isinf(longest_s):
            continue
        assert int(buckets.sizes[groups.kind[groups.kind >= 0]].sum()) <= 4
        assert groups.taken[:, :, 0].sum(axis=1).tolist() == buckets.counts[0].tolist()
        ratios.append(longest_s / least)
        assert ratios[-1] >= 1 - 1e-9
    assert len(ratios) >= 30
    assert float(np.mean(ratios)) < 1.03 and max(ratios) < 1.15


def test_flexsp_runs_unlike_groups_side_by_side() -> None:
    step = make_plan(problem([32_000, *[3_000] * 16], 8), "flexsp")
    validate(step)
    degrees = step.sequence_degrees()
    assert degrees[0] in (4, 8) and int(degrees[1:].max()) < int(degrees[0])
    assert all(d & (d - 1) == 0 for d in degrees.tolist())


def test_flexsp_holds_what_only_all_ranks_hold_where_they_are_no_power_of_two() -> None:
    step = make_plan(problem([7 * CAPACITY, 100, 100], 7), "flexsp")
    validate(step)
    assert int(step.sequence_degrees()[0]) == 7


def test_wlb_packs_have_equal_work_within_memory() -> None:
    lengths = np.minimum(lognormal(2000, 2048), CAPACITY)
    work_s = lengths * (1.0 + lengths / 2048)
    pack = balanced_packs(work_s, lengths, CAPACITY, 16)
    assert int(np.bincount(pack, weights=lengths).max()) <= CAPACITY
    load = np.bincount(pack, weights=work_s)
    assert len(load) % 16 == 0
    in_order = np.bincount(np.arange(len(lengths)) % len(load), weights=work_s)
    assert load.max() / load.mean() < 0.7 * in_order.max() / in_order.mean()


def test_wlb_adds_a_pack_where_memory_leaves_no_room() -> None:
    pack = balanced_packs(np.ones(3), np.array([600, 600, 600]), 1000, 1)
    assert sorted(pack.tolist()) == [0, 1, 2]


def test_wlb_leaves_short_documents_whole_and_cuts_long_ones() -> None:
    lengths = [60_000, *[1_000] * 150]
    asked = problem(lengths, 16)
    step = make_plan(asked, "wlb-llm")
    validate(step)
    degrees = step.sequence_degrees()
    assert degrees[0] == static_degree(asked) and (degrees == 1).any()
    fixed = make_plan(asked, "static")
    assert step.predicted is not None and fixed.predicted is not None
    assert step.predicted.step_time_s <= fixed.predicted.step_time_s
