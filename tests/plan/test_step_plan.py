"""The columnar plan: canonical order and what can be read off it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.plan.step_plan import StepPlan, step_plan
from tests.plans import columns_of, drawn, rebuilt, valid_plans


@given(valid_plans(), st.randoms(use_true_random=False))
def test_the_order_of_rows_means_nothing(plan: StepPlan, random: object) -> None:
    rows = list(range(len(plan.pieces)))
    random.shuffle(rows)
    again = rebuilt(plan, {name: [column[i] for i in rows] for name, column in columns_of(plan).items()})
    for name, column in columns_of(plan).items():
        assert columns_of(again)[name] == column


@given(valid_plans())
def test_views_agree_with_the_rows(plan: StepPlan) -> None:
    pieces = plan.pieces
    rows, begin = plan.sequence_rows()
    for sequence in range(plan.num_sequences):
        own = rows[begin[sequence] : begin[sequence + 1]]
        assert set(pieces.sequence[own]) == {sequence}
        assert pieces.cp_index[own].tolist() == list(range(plan.sequence_degrees()[sequence]))
    seen = []
    for rank in range(plan.hdp_size):
        micro_batches = list(plan.micro_batch_rows(rank))
        assert len(micro_batches) == plan.num_micro_batches()[rank]
        for number, own in enumerate(micro_batches):
            assert set(pieces.rank[own]) == {rank} and set(pieces.micro_batch[own]) == {number}
            assert (np.diff(pieces.sequence[own]) > 0).all()
            seen += own.tolist()
    assert seen == list(range(len(pieces)))
    assert plan.num_tokens == pieces.tokens.sum()
    ids = plan.micro_batch_ids()
    assert ids.tolist() == sorted(ids) and ids.max() + 1 == plan.num_micro_batches().sum()


def test_an_idle_rank_has_no_micro_batch() -> None:
    plan = drawn("5 6", "0 | 1[0/2]", "", "1[1/2]")
    assert plan.num_micro_batches().tolist() == [2, 0, 1]
    assert list(plan.micro_batch_rows(1)) == []
    assert plan.sequence_degrees().tolist() == [1, 2]


def test_block_plans_count_distinct_ranks() -> None:
    plan = step_plan(
        strategy="fcp",
        hdp_size=2,
        tokens_per_rank=10,
        num_layers=1,
        lengths=[10],
        sequence=[0, 0, 0],
        rank=[0, 1, 0],
        micro_batch=[0, 0, 0],
        tokens=[3, 4, 3],
        token_begin=[0, 3, 7],
        token_end=[3, 7, 10],
    )
    assert plan.layout == "blocks"
    assert plan.sequence_degrees().tolist() == [2]


def test_columns_must_fit_together() -> None:
    good = drawn("4", "0")
    columns = columns_of(good)
    with pytest.raises(ValueError, match="column rank has 2 rows"):
        rebuilt(good, columns | {"rank": [0, 0]})
    assert rebuilt(good, columns | {"token_begin": [0], "token_end": [4]}).layout == "chunks"
    with pytest.raises(ValueError, match="a plan needs cp_degree and cp_index"):
        rebuilt(good, {name: column for name, column in columns.items() if name != "cp_index"})
