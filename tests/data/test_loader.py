import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.config.schema import BatchConfig
from bytescale.data import (
    GlobalBatch,
    LoaderState,
    SequenceDataset,
    SourceState,
    TokenMicroBatch,
    next_batch,
    read_micro_batch,
)
from bytescale.errors import UserError
from bytescale.plan.step_plan import step_plan
from tests.data.corpora import dataset_of
from tests.plans import placed

LENGTHS = [2, 9, 3, 14, 5, 5, 8, 30, 2, 4, 6]


def draw(
    dataset: SequenceDataset, config: BatchConfig, num_batches: int, state: LoaderState | None = None, seed: int = 0
) -> tuple[list[list[int]], list[LoaderState]]:
    state = state or LoaderState()
    batches, states = [], []
    for _ in range(num_batches):
        batch, state = next_batch(dataset, config, seed, state)
        np.testing.assert_array_equal(batch.lengths, dataset.lengths[batch.sequence_ids])
        np.testing.assert_array_equal(batch.num_targets, batch.lengths - 1)
        batches.append(batch.sequence_ids.tolist())
        states.append(state)
    return batches, states


def place(state: LoaderState) -> tuple[int, int]:
    (source,) = state.sources
    return source.epoch, source.position


def whole_batch(dataset: SequenceDataset) -> GlobalBatch:
    """Every sequence once, in the order of the dataset."""
    return GlobalBatch(np.arange(len(dataset)), dataset.lengths, dataset.num_targets)


def micro_batches(
    dataset: SequenceDataset, placement: list[list[tuple[int, int]]], num_ranks: int
) -> list[list[TokenMicroBatch]]:
    plan = placed(dataset.lengths.tolist(), placement, num_ranks)
    batch = whole_batch(dataset)
    return [
        [read_micro_batch(dataset, batch, plan, rows) for rows in plan.micro_batch_rows(rank)]
        for rank in range(num_ranks)
    ]


def test_by_sequences_every_epoch_is_a_permutation() -> None:
    dataset = dataset_of(LENGTHS)
    batches, states = draw(dataset, BatchConfig(sequences=4), 11)
    order = [i for batch in batches for i in batch]
    assert [len(batch) for batch in batches] == [4] * 11
    epochs = [order[e * 11 : e * 11 + 11] for e in range(4)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [place(states[i]) for i in (1, 2, -1)] == [(0, 8), (1, 1), (4, 0)]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(1, 120), st.integers(0, 3))
def test_by_tokens_fills_in_order(lengths: list[int], tokens: int, seed: int) -> None:
    dataset = dataset_of(lengths)
    batches, states = draw(dataset, BatchConfig(tokens=tokens), 6, seed=seed)
    order = [i for batch in batches for i in batch]
    epochs = range(len(order) // len(lengths) + 2)
    expected = np.concatenate([np.random.default_rng([seed, e]).permutation(len(lengths)) for e in epochs])
    assert order == expected[: len(order)].tolist()
    position = 0
    for batch, state in zip(batches, states, strict=True):
        position += len(batch)
        total = sum(lengths[i] for i in batch)
        assert len(batch) == 1 or total <= tokens
        # The first that is left out would not have fitted.
        assert total + lengths[expected[position]] > tokens
        assert place(state) == divmod(position, len(lengths))


def test_window_of_drawing_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(LENGTHS * 7)
    for config in (BatchConfig(tokens=100), BatchConfig(tokens=700), BatchConfig(sequences=50)):
        expected = draw(dataset, config, 12)
        for window in (1, 3, 11):
            monkeypatch.setattr("bytescale.data.batches.DRAW_WINDOW", window)
            assert draw(dataset, config, 12) == expected
        monkeypatch.undo()


def test_batch_larger_than_the_data() -> None:
    batches, states = draw(dataset_of([2, 3]), BatchConfig(sequences=5), 2)
    assert [len(batch) for batch in batches] == [5, 5]
    assert place(states[-1]) == (5, 0)


def test_known_batches() -> None:
    """The order is part of what a seed means: a change of it changes every run."""
    batches, _ = draw(dataset_of(LENGTHS), BatchConfig(sequences=6), 2, seed=7)
    order = [*np.random.default_rng([7, 0]).permutation(11), *np.random.default_rng([7, 1]).permutation(11)]
    assert batches == [[int(i) for i in order[:6]], [int(i) for i in order[6:12]]]
    assert draw(dataset_of(LENGTHS), BatchConfig(sequences=6), 2, seed=8)[0] != batches


def test_state_resumes_exactly() -> None:
    dataset = dataset_of(LENGTHS)
    for config in (BatchConfig(tokens=20), BatchConfig(sequences=4)):
        batches, states = draw(dataset, config, 12)
        for i, state in enumerate(states[:-1]):
            stored = LoaderState.from_dict(json.loads(json.dumps(state.to_dict())))
            assert stored == state
            assert draw(dataset, config, 12 - i - 1, stored)[0] == batches[i + 1 :]


def test_state_of_other_data() -> None:
    with pytest.raises(UserError, match="stands at sequence 3 of epoch 0, the data has 2 sequences"):
        next_batch(dataset_of([2, 3]), BatchConfig(sequences=1), 0, LoaderState((SourceState(position=3),)))


def test_labels_before_sharding() -> None:
    ranks = micro_batches(dataset_of([5, 3]), [[(0, 0), (1, 0)], [(0, 0), (1, 0)]], 2)
    # Tokens 0..4 and 5..7; of 5 tokens index 0 holds 0 and 4, of 3 tokens index 0 holds the last.
    assert ranks[0][0].input_ids.tolist() == [0, 4, 7]
    assert ranks[0][0].labels.tolist() == [1, -100, -100]
    assert ranks[0][0].position_ids.tolist() == [0, 4, 2]
    assert ranks[1][0].input_ids.tolist() == [1, 2, 3, 5, 6]
    assert ranks[1][0].labels.tolist() == [2, 3, 4, 6, 7]
    assert ranks[1][0].position_ids.tolist() == [1, 2, 3, 0, 1]


def test_zigzag_per_sequence() -> None:
    ranks = micro_batches(dataset_of([8, 8]), [[(0, 0), (1, 0)], [(0, 0), (1, 0)]], 2)
    assert ranks[0][0].input_ids.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert ranks[1][0].input_ids.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_positions_are_global_inside_the_sequence() -> None:
    ranks = micro_batches(dataset_of([2048]), [[(0, 0), (1, 0)]], 2)
    assert ranks[1][0].position_ids.tolist() == list(range(512, 1536))
    assert ranks[0][0].position_ids.tolist() == [*range(512), *range(1536, 2048)]


def test_degree_one_reads_whole_sequences_in_ascending_order() -> None:
    ranks = micro_batches(dataset_of([4, 3, 2]), [[(0, 1)], [(0, 0)], [(0, 1)]], 2)
    assert [m.input_ids.tolist() for m in ranks[0]] == [[4, 5, 6], [0, 1, 2, 3, 7, 8]]
    assert [m.labels.tolist() for m in ranks[0]] == [[5, 6, -100], [1, 2, 3, -100, 8, -100]]
    assert ranks[1] == []


@pytest.mark.parametrize(("lengths", "num_ranks"), [([7], 2), ([1, 3, 67], 4), ([1000], 7), ([32769], 4)])
def test_awkward_lengths_are_read_whole(lengths: list[int], num_ranks: int) -> None:
    # One token more, so that no document counts as empty, then cut back to the length in question.
    dataset = dataset_of([max(n, 2) for n in lengths])
    dataset.lengths[:] = lengths
    ranks = micro_batches(dataset, [[(rank, 0) for rank in range(num_ranks)]] * len(lengths), num_ranks)
    read = np.concatenate([m.input_ids for rank in ranks for m in rank])
    expected = np.concatenate([dataset.read(i, 0, n) for i, n in enumerate(lengths)])
    np.testing.assert_array_equal(np.sort(read), expected)


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]], int]:
    """Any lengths on any ranks, one micro-batch a sequence."""
    num_ranks = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(2, 60), min_size=1, max_size=12))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)
    return lengths, [[(rank, draw(st.integers(0, 1))) for rank in draw(ranks)] for _ in lengths], num_ranks


@settings(deadline=None)
@given(placements())
def test_every_token_once_with_its_own_label(case: tuple[list[int], list[list[tuple[int, int]]], int]) -> None:
    lengths, placement, num_ranks = case
    dataset = dataset_of(lengths)
    parts = [m for rank in micro_batches(dataset, placement, num_ranks) for m in rank]
    tokens, labels, positions = (
        np.concatenate([getattr(m, name) for m in parts]) for name in ("input_ids", "labels", "position_ids")
    )
    order = np.argsort(tokens)
    # Tokens are numbered through, so the whole data in order is 0, 1, 2, ...
    np.testing.assert_array_equal(tokens[order], np.arange(sum(lengths)))
    np.testing.assert_array_equal(positions[order], np.concatenate([np.arange(n) for n in lengths]))
    expected = np.arange(1, sum(lengths) + 1)
    expected[np.cumsum(lengths) - 1] = -100
    np.testing.assert_array_equal(labels[order], expected)
    assert (labels >= 0).sum() == dataset.num_targets.sum()


def test_block_layout_is_refused_by_name() -> None:
    plan = step_plan(
        strategy="fcp", hdp_size=1, tokens_per_rank=8, num_layers=1, lengths=[4], sequence=[0], rank=[0],
        micro_batch=[0], tokens=[4], token_begin=[0], token_end=[4],
    )  # fmt: skip
    with pytest.raises(UserError, match=r'strategy fcp places sequences in the "blocks" layout'):
        read_micro_batch(dataset_of([4]), whole_batch(dataset_of([4])), plan, np.array([0]))
