"""Valid plans pass; every single defect is refused in words that name it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bytescale.plan.memory import resident_tokens
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.plan.validate import PlanError, validate
from tests.plans import columns_of, drawn, plan_of, rebuilt, valid_plans

Columns = dict[str, list[float]]


@given(valid_plans())
def test_valid_plans_pass_and_are_described(plan: StepPlan) -> None:
    report = validate(plan)
    assert report.num_micro_batches.tolist() == plan.num_micro_batches().tolist()
    assert report.idle_ranks.tolist() == np.flatnonzero(report.num_micro_batches == 0).tolist()
    assert report.peak_tokens == np.bincount(plan.micro_batch_ids(), weights=plan.pieces.tokens).max()


@given(valid_plans(pp_size=3))
def test_waves_of_gangs_may_cycle_in_a_pipeline_but_nothing_else_is_wrong(plan: StepPlan) -> None:
    try:
        validate(plan)
    except PlanError as error:
        assert "cycle" in str(error)


def _base() -> StepPlan:
    """Three ranks: sequence 0 on all, then sequence 1 on two, sequences 2 and 3 whole."""
    return drawn("30 20 7 5", "0[0/3] | 1[0/2] 2", "0[1/3] | 1[1/2]", "0[2/3] 3", tokens_per_rank=17, num_layers=4)


def _set(name: str, sequence: int, value: float) -> Callable[[Columns], None]:
    """Change column `name` in the first row of `sequence`."""

    def change(columns: Columns) -> None:
        columns[name][columns["sequence"].index(sequence)] = value

    return change


def _drop(sequence: int) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        row = columns["sequence"].index(sequence)
        for column in columns.values():
            del column[row]

    return change


def _repeat(sequence: int) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        row = columns["sequence"].index(sequence)
        for column in columns.values():
            column.append(column[row])

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("sequence", 2, 9), "names sequence 9; sequences are 0..3"),
        (_set("sequence", 2, -1), "names sequence -1"),
        (_set("rank", 2, 3), "sequence 2 has a piece on rank 3; ranks are 0..2"),
        (_set("rank", 2, -1), "sequence 2 has a piece on rank -1"),
        (_set("micro_batch", 2, -1), "sequence 2 on rank 0 is in micro-batch -1"),
        (_set("offload_ratio", 1, 1.5), "sequence 1 on rank 0 has offload_ratio 1.5"),
        (_set("offload_ratio", 1, -0.1), "offload_ratio -0.1"),
        (_set("offload_ratio", 1, float("nan")), "offload_ratio nan"),
        (_drop(2), r"sequence 2 \(7 tokens\) is not placed"),
        (_drop(1), "sequence 1 says cp_degree 2 on rank 1 but has 1 pieces"),
        (_repeat(3), "sequence 3 says cp_degree 1 on rank 2 but has 2 pieces"),
        (_set("cp_degree", 1, 3), "sequence 1 says cp_degree 3 on rank 0 but has 2"),
        (_set("cp_degree", 2, 0), "sequence 2 says cp_degree 0"),
        (_set("cp_index", 1, 1), "sequence 1 must have cp_index 0..1 once each"),
        (_set("cp_index", 2, 1), "sequence 2 must have cp_index 0..0"),
        (_set("rank", 0, 1), "sequence 0 has two pieces on rank 1"),
        (_set("tokens", 1, 11), "sequence 1 on rank 0 says 11 tokens; piece 0 of 2 of 20 tokens has 10"),
        (_set("tokens", 2, 0), "sequence 2 on rank 0 says 0 tokens"),
        (_set("micro_batch", 3, 2), r"rank 2 has a micro-batch 2 \(sequence 3\) but none before it"),
        (_set("micro_batch", 0, 5), "without gaps"),
    ],
)
def test_one_defect_is_refused_in_its_own_words(change: Callable[[Columns], None], words: str) -> None:
    plan = _base()
    validate(plan)
    columns = columns_of(plan)
    change(columns)
    with pytest.raises(PlanError, match=words) as caught:
        validate(rebuilt(plan, columns))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hdp_size", "pp_size", "tokens_per_rank", "num_layers"])
def test_sizes_are_at_least_one(name: str) -> None:
    plan = _base()
    with pytest.raises(PlanError, match=f"{name} is 0; it must be at least 1"):
        validate(rebuilt(plan, columns_of(plan), **{name: 0}))


@pytest.mark.parametrize("name", ["hdp_size", "pp_size"])
def test_sizes_beyond_any_machine_are_refused_before_anything_is_allocated(name: str) -> None:
    plan = _base()
    with pytest.raises(PlanError, match=f"{name} is {2**62}; plans go up to"):
        validate(rebuilt(plan, columns_of(plan), **{name: 2**62}))


@pytest.mark.parametrize("layout", ["zigzag", "blocks", "chunks"])
def test_a_plan_of_nothing_is_valid_in_every_layout(layout: str) -> None:
    columns = {"zigzag": ["cp_degree", "cp_index"], "blocks": ["token_begin", "token_end"]}
    names = columns.get(layout, [*columns["zigzag"], *columns["blocks"]])
    names += ["sequence", "rank", "micro_batch", "tokens", "lengths"]
    empty: dict[str, Any] = {name: [] for name in names}
    plan = step_plan(strategy="hand", hdp_size=2, pp_size=2, tokens_per_rank=8, num_layers=2, **empty)
    assert plan.layout == layout
    assert validate(plan).idle_ranks.tolist() == [0, 1]


def test_lengths_are_at_least_one() -> None:
    plan = _base()
    with pytest.raises(PlanError, match="sequence 2 has length 0"):
        validate(rebuilt(plan, columns_of(plan), lengths=[30, 20, 0, 5]))


def test_memory_names_the_micro_batch() -> None:
    plan = _base()
    with pytest.raises(
        PlanError,
        match=r"micro-batch 1 of rank 0 \(first sequence 1\) holds 17 tokens; tokens_per_rank is 16",
    ):
        validate(rebuilt(plan, columns_of(plan), tokens_per_rank=16))


def test_offloading_makes_room_but_two_layers_stay() -> None:
    plan = drawn("40", "0", tokens_per_rank=30, num_layers=4)
    columns = columns_of(plan)
    with pytest.raises(PlanError, match="holds 40 tokens"):
        validate(plan)
    assert validate(rebuilt(plan, columns | {"offload_ratio": [0.5]})).peak_tokens == 40 * (2 + 0.5 * 2) / 4
    with pytest.raises(PlanError, match="holds 40 tokens"):
        validate(rebuilt(plan, columns | {"offload_ratio": [1.0]}, num_layers=2))
    assert resident_tokens(np.array([40]), np.array([1.0]), 1).tolist() == [40.0]


@given(valid_plans(), st.data())
def test_moving_one_piece_never_passes_unless_the_plan_stays_legal(plan: StepPlan, data: st.DataObject) -> None:
    """A piece moved to another rank: the validator agrees with a slow check of the rules, written independently."""
    columns = columns_of(plan)
    row = data.draw(st.integers(0, len(plan.pieces) - 1))
    columns["rank"][row] = data.draw(st.integers(0, plan.hdp_size - 1))
    columns["micro_batch"][row] = data.draw(st.integers(0, 3))
    moved = rebuilt(plan, columns)
    try:
        validate(moved)
    except PlanError:
        assert not _is_legal(moved)
    else:
        assert _is_legal(moved)


def _is_legal(plan: StepPlan) -> bool:
    pieces = plan.pieces
    on = [(int(r), int(m), int(s)) for r, m, s in zip(pieces.rank, pieces.micro_batch, pieces.sequence, strict=True)]
    if len({(r, s) for r, _, s in on}) < len(on):
        return False
    for rank in range(plan.hdp_size):
        numbers = sorted({m for r, m, _ in on if r == rank})
        if numbers != list(range(len(numbers))):
            return False
    # Run the step: a gang starts when it is next on every rank it needs.
    waiting = {rank: sorted({m for r, m, _ in on if r == rank}) for rank in range(plan.hdp_size)}
    while any(waiting.values()):
        ready = next((gang for gang in _gangs(on, waiting) if _can_run(gang, waiting)), None)
        if ready is None:
            return False
        for rank, _ in ready:
            waiting[rank].pop(0)
    return True


def _gangs(on: list[tuple[int, int, int]], waiting: dict[int, list[int]]) -> list[set[tuple[int, int]]]:
    gangs = []
    for rank, queue in waiting.items():
        if queue:
            gang = {(rank, queue[0])}
            while True:
                shared = {s for r, m, s in on if (r, m) in gang}
                grown = gang | {(r, m) for r, m, s in on if s in shared}
                if grown == gang:
                    break
                gang = grown
            gangs.append(gang)
    return gangs


def _can_run(gang: set[tuple[int, int]], waiting: dict[int, list[int]]) -> bool:
    return len({rank for rank, _ in gang}) == len(gang) and all(waiting[rank][:1] == [m] for rank, m in gang)


def test_two_micro_batches_of_a_rank_in_one_gang_are_refused() -> None:
    plan = drawn("4 4", "0[0/2] | 1[0/2]", "0[1/2] 1[1/2]")
    with pytest.raises(
        PlanError, match=r"rank 0 would have to run micro-batches 0 \(sequence 0\) and 1 at the same time"
    ):
        validate(plan)


def test_opposite_orders_are_a_cycle() -> None:
    plan = drawn("4 4", "0[0/2] | 1[0/2]", "1[1/2] | 0[1/2]")
    with pytest.raises(PlanError, match="cycle and would hang") as caught:
        validate(plan)
    words = re.findall(r"sequence (\d) on rank 0, 1", str(caught.value))
    assert words in (["0", "1", "0"], ["1", "0", "1"])


def test_the_same_order_can_still_hang_in_a_pipeline() -> None:
    """Pipeline 0 runs [L1, x, L2], pipeline 1 runs [L1, L2]: fine without stages, a cycle with two."""
    ranks = [[[0], [2], [1]], [[0], [1]]]
    validate(plan_of([8, 8, 3], ranks))
    with pytest.raises(PlanError, match=r"cycle and would hang.* at stage ") as caught:
        validate(plan_of([8, 8, 3], ranks, pp_size=2))
    assert "backward of sequence" in str(caught.value) and "forward of sequence" in str(caught.value)
    validate(drawn("8 8 3 3", "0[0/2] | 2 | 1[0/2]", "0[1/2] | 3 | 1[1/2]", pp_size=2))


def _blocks(rank: list[int], begin: list[int], end: list[int]) -> StepPlan:
    return step_plan(
        strategy="fcp",
        hdp_size=2,
        tokens_per_rank=100,
        num_layers=1,
        lengths=[10],
        sequence=[0] * len(rank),
        rank=rank,
        micro_batch=[0] * len(rank),
        tokens=[e - b for b, e in zip(begin, end, strict=True)],
        token_begin=begin,
        token_end=end,
    )


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [
        ([0, 4], [4, 9], "sequence 0 has 10 tokens; its blocks end at 9"),
        ([0, 5], [4, 10], "the block at 5 on rank 1 must begin at 4"),
        ([0, 3], [4, 10], "the block at 3 on rank 1 must begin at 4"),
        ([1, 4], [4, 10], "the block at 1 on rank 0 must begin at 0"),
    ],
)
def test_blocks_must_tile_the_sequence(begin: list[int], end: list[int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        validate(_blocks([0, 1], begin, end))


@given(st.lists(st.integers(1, 9), max_size=4, unique=True), st.data())
def test_any_tiling_is_valid(cuts: list[int], data: st.DataObject) -> None:
    bounds = [0, *sorted(cuts), 10]
    rank = data.draw(st.lists(st.integers(0, 1), min_size=len(bounds) - 1, max_size=len(bounds) - 1))
    assume(len(bounds) > 1)
    validate(_blocks(rank, bounds[:-1], bounds[1:]))
