import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.config.data import Mix
from bytescale.config.schema import BatchConfig
from bytescale.data import LoaderState, SequenceDataset, SequenceOrder, StepLoader, build_dataset, next_batch
from bytescale.data.batches import repetition_notes, steps_until_end
from bytescale.data.dataset import SourceCorpus
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from tests.data.corpora import corpus_of
from tests.plans import placed


def mixture(
    lengths: Sequence[Sequence[int]],
    weights: Sequence[float],
    mix: Mix = "tokens",
    epochs: Sequence[int | None] | None = None,
    names: str = "abcdefgh",
) -> SequenceDataset:
    bounds = epochs or [None] * len(lengths)
    corpora = [
        SourceCorpus(corpus_of(of_source), names[i], weights[i], bounds[i]) for i, of_source in enumerate(lengths)
    ]
    return build_dataset(corpora, max_context=1 << 40, mix=mix)


def drawn(
    dataset: SequenceDataset, config: BatchConfig, num_batches: int, state: LoaderState | None = None
) -> tuple[list[list[int]], list[LoaderState]]:
    state, order = state or LoaderState(), SequenceOrder(dataset, 5)
    batches, states = [], []
    for _ in range(num_batches):
        batch, state = next_batch(dataset, config, 5, state, order)
        batches.append(batch.sequence_ids.tolist())
        states.append(state)
    return batches, states


LONG = np.random.default_rng(0).lognormal(5, 1.5, 400).astype(int) + 2
SHORT = np.random.default_rng(1).integers(2, 60, 900)
HUGE = np.random.default_rng(2).integers(20_000, 60_000, 30)


@pytest.mark.parametrize("mix", ["tokens", "sequences"])
@pytest.mark.parametrize("config", [BatchConfig(tokens=20_000), BatchConfig(sequences=64)])
def test_shares_after_a_thousand_batches(mix: Mix, config: BatchConfig) -> None:
    weights = [5.0, 3.0, 2.0]
    dataset = mixture([SHORT.tolist(), LONG.tolist(), HUGE.tolist()], weights, mix)
    state = drawn(dataset, config, 1000)[1][-1]
    given = np.array([source.drawn for source in state.sources])
    np.testing.assert_allclose(given / given.sum(), np.array(weights) / 10, atol=0.005)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=9), min_size=2, max_size=4),
    st.lists(st.floats(0.05, 3), min_size=4, max_size=4),
    st.sampled_from(["tokens", "sequences"]),
)
def test_no_source_is_further_from_its_share_than_half_a_sequence(
    lengths: list[list[int]], weights: list[float], mix: Mix
) -> None:
    dataset = mixture(lengths, weights, mix)
    state = drawn(dataset, BatchConfig(sequences=37), 3)[1][-1]
    longest = [max(of_source) if mix == "tokens" else 1 for of_source in lengths]
    # Everything before one virtual time has come, nothing after it: half a sequence to either side.
    low, high = (
        [(s.drawn + sign * most / 2) / s.weight for s, most in zip(state.sources, longest, strict=True)]
        for sign in (-1, 1)
    )
    assert max(low) <= min(high) + 1e-6


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=9), min_size=2, max_size=4),
    st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=4, max_size=4),
    st.integers(1, 200),
    st.sampled_from([1, 3, 4096]),
)
def test_resuming_and_windows_change_nothing(
    lengths: list[list[int]], epochs: list[int | None], tokens: int, window: int
) -> None:
    dataset = mixture(lengths, [1.0, 2.5, 0.3, 1.7], epochs=epochs)
    expected, states = drawn(dataset, BatchConfig(tokens=tokens), 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytescale.data.batches.DRAW_WINDOW", window)
        for i, state in enumerate(states[:-1]):
            stored = LoaderState.from_dict(json.loads(json.dumps(state.to_dict())))
            assert stored == state
            assert drawn(dataset, BatchConfig(tokens=tokens), 7 - i, stored)[0] == expected[i + 1 :]


def test_epochs_are_bounded_and_the_others_go_on() -> None:
    dataset = mixture([[5] * 10, [5] * 10], [1, 1], epochs=[2, None])
    batches, states = drawn(dataset, BatchConfig(sequences=8), 10)
    order = np.array([i for batch in batches for i in batch])
    assert np.bincount(order[order < 10]).tolist() == [2] * 10
    assert np.array_equal(order[order < 10][:10] // 10, [0] * 10) and sorted(order[order < 10][:10]) == list(range(10))
    assert set(order[40:]) <= set(range(10, 20))
    assert [(s.epoch, s.position) for s in states[-1].sources] == [(2, 0), (6, 0)]


def test_the_data_ends_when_every_source_has() -> None:
    dataset = mixture([[5] * 10, [7] * 3], [1, 1], epochs=[2, 1])
    batches, _ = drawn(dataset, BatchConfig(sequences=8), 5)
    assert [len(batch) for batch in batches] == [8, 8, 7, 0, 0]
    assert [steps_until_end(dataset, BatchConfig(sequences=8), 5, limit) for limit in (2, 3, 100)] == [2, 3, 3]
    assert steps_until_end(mixture([[5] * 10], [1]), BatchConfig(sequences=8), 5, 100) == 100

    def one_rank(lengths: np.ndarray) -> StepPlan:  # type: ignore[type-arg]
        return placed(lengths.tolist(), [[(0, 0)]] * len(lengths), 1)

    with StepLoader(dataset, BatchConfig(sequences=8), 5, one_rank, 0) as loader:
        assert [step.batch.sequence_ids.tolist() for step in loader] == batches[:3]
        assert next(loader, None) is None


def test_one_of_several_sources_reads_its_own_tokens() -> None:
    dataset = mixture([[3, 4], [5]], [1, 1])
    tokens, labels = dataset.reader.read_runs(np.array([2, 0, 1]), np.array([1, 0, 2]), np.array([5, 3, 4]))
    assert tokens.tolist() == [1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert labels.tolist() == [2, 3, 4, -100, 1, 2, -100, 6, -100]
    assert dataset.given(np.array([0, 2, 2])) == {"a": (1, 3), "b": (2, 10)}


def test_other_weights_count_from_where_they_begin() -> None:
    lengths = [[5] * 40, [5] * 40]
    _, states = drawn(mixture(lengths, [1, 3]), BatchConfig(sequences=8), 4)
    changed = mixture(lengths, [3, 1])
    batches, after = drawn(changed, BatchConfig(sequences=8), 4, states[-1])
    assert [sum(i < 40 for i in batch) for batch in batches] == [6] * 4
    assert [s.position for s in after[-1].sources] == [8 + 24, 24 + 8]
    # A third source begins at its beginning, the others go on.
    wider = mixture([*lengths, [5] * 40], [1, 1, 2])
    batches, after = drawn(wider, BatchConfig(sequences=8), 4, states[-1])
    assert [s.position for s in after[-1].sources] == [8 + 8, 24 + 8, 16]
    with pytest.raises(UserError, match="stands at sequence 24 of epoch 0 of source b, the data has 20 sequences"):
        next_batch(mixture([[5] * 40, [5] * 20], [1, 3]), BatchConfig(sequences=8), 5, states[-1])


def test_a_source_keeps_its_order_among_others() -> None:
    alone, _ = drawn(mixture([[5] * 30], [1], names="b"), BatchConfig(sequences=30), 1)
    mixed, _ = drawn(mixture([[5] * 8, [5] * 30], [1, 1]), BatchConfig(sequences=90), 1)
    assert [i - 8 for i in mixed[0] if i >= 8][:30] == alone[0]


def test_notes_of_a_mixture() -> None:
    dataset = mixture([[10] * 50, [10] * 10], [0.5, 0.5], epochs=[None, 2])
    assert repetition_notes(dataset, BatchConfig(tokens=100), 8) == (
        "source b: used up after about 4 steps, see data.sources.epochs = 2",
    )
    bounded = replace(dataset.sources[1], epochs=None)
    dataset = replace(dataset, sources=(dataset.sources[0], bounded))
    assert repetition_notes(dataset, BatchConfig(sequences=10), 8) == (
        "source b: 8 steps go through the data about 4.0 times (epochs)",
    )
