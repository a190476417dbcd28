import threading
import time

import numpy as np
import pytest

from bytescale.config.schema import BatchConfig
from bytescale.data import LoaderState, SequenceDataset, StepData, StepLoader, build_dataset
from bytescale.data.steps import Planner
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import PlanError
from tests.data.corpora import corpus_of, dataset_of
from tests.plans import placed

LENGTHS = [2, 9, 3, 14, 5, 5, 8, 30, 2, 4, 6]


def round_robin(num_ranks: int) -> Planner:
    """Whole sequences, one a micro-batch, dealt to the ranks in turn."""
    return lambda lengths: placed(
        lengths.tolist(), [[(i % num_ranks, i // num_ranks)] for i in range(len(lengths))], num_ranks
    )


def everywhere(num_ranks: int) -> Planner:
    """Every sequence on all ranks, one after the other."""
    return lambda lengths: placed(
        lengths.tolist(), [[(rank, i) for rank in range(num_ranks)] for i in range(len(lengths))], num_ranks
    )


def collect(
    dataset: SequenceDataset, planner: Planner, rank: int = 0, num_steps: int = 6, **more: object
) -> list[StepData]:
    with StepLoader(dataset, BatchConfig(tokens=30), 3, planner, rank, num_steps=num_steps, **more) as loader:
        return list(loader)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bytescale-loader"]


def test_steps_are_numbered_planned_and_read() -> None:
    dataset = dataset_of(LENGTHS)
    steps = collect(dataset, round_robin(2), rank=1)
    assert [data.step for data in steps] == [1, 2, 3, 4, 5, 6]
    for data in steps:
        own = data.batch.sequence_ids[1::2]
        assert [m.input_ids.tolist() for m in data.micro_batches] == [
            dataset.read(i, 0, int(dataset.lengths[i])).tolist() for i in own
        ]
        assert data.plan_time_s > 0
        assert data.data_wait_s >= 0
    assert not loader_threads()


def test_batches_do_not_depend_on_ranks_or_plan() -> None:
    dataset = dataset_of(LENGTHS)
    reference = [data.batch.sequence_ids.tolist() for data in collect(dataset, round_robin(1))]
    for num_ranks in (2, 3, 5):
        for planner in (round_robin(num_ranks), everywhere(num_ranks)):
            ranks = [collect(dataset, planner, rank) for rank in range(num_ranks)]
            for rank in ranks:
                assert [data.batch.sequence_ids.tolist() for data in rank] == reference
            for step, ids in enumerate(reference):
                read = [m.input_ids for rank in ranks for m in rank[step].micro_batches]
                expected = [dataset.read(i, 0, int(dataset.lengths[i])) for i in ids]
                np.testing.assert_array_equal(np.sort(np.concatenate(read)), np.sort(np.concatenate(expected)))


def test_resume_continues_the_run() -> None:
    dataset = dataset_of(LENGTHS)
    steps = collect(dataset, everywhere(2), num_steps=8)
    again = collect(dataset, everywhere(2), num_steps=5, state=steps[2].state_after, first_step=4)
    assert [data.step for data in again] == [4, 5, 6, 7, 8]
    for a, b in zip(steps[3:], again, strict=True):
        assert a.state_after == b.state_after
        assert [m.input_ids.tolist() for m in a.micro_batches] == [m.input_ids.tolist() for m in b.micro_batches]


def test_an_idle_rank_has_no_micro_batches() -> None:
    steps = collect(dataset_of(LENGTHS), round_robin(40), rank=39)
    assert [data.micro_batches for data in steps] == [()] * 6


def test_next_step_is_prepared_meanwhile() -> None:
    planned = []

    def slow(lengths: np.ndarray) -> StepPlan:
        time.sleep(0.1)
        planned.append(len(lengths))
        return round_robin(1)(lengths)

    with StepLoader(dataset_of(LENGTHS), BatchConfig(sequences=2), 0, slow, 0) as loader:
        first = next(loader)
        deadline = time.monotonic() + 30
        while len(planned) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        # One step ahead, and no more.
        assert len(planned) == 2
        second = next(loader)
    assert first.data_wait_s > second.data_wait_s
    assert first.plan_time_s > 0.09


def test_errors_reach_the_consumer() -> None:
    def broken(lengths: np.ndarray) -> StepPlan:
        raise RuntimeError("no plan today")

    def wrong(lengths: np.ndarray) -> StepPlan:
        return placed(lengths.tolist(), [[(0, 0)]] * len(lengths), 1, tokens_per_rank=1)

    def stale(lengths: np.ndarray) -> StepPlan:
        return placed([7], [[(0, 0)]], 1)

    cases = [
        (broken, RuntimeError, "no plan today"),
        (wrong, PlanError, "tokens_per_rank"),
        (stale, ValueError, "not for"),
    ]
    for planner, kind, message in cases:
        with StepLoader(dataset_of(LENGTHS), BatchConfig(sequences=2), 0, planner, 0, num_steps=3) as loader:
            for _ in range(2):
                with pytest.raises(kind, match=message):
                    next(loader)
    assert not loader_threads()


def test_the_comparison_with_static_is_made_where_nobody_waits() -> None:
    threads: list[str] = []

    def static_bytes(lengths: np.ndarray) -> int:
        threads.append(threading.current_thread().name)
        return int(lengths.sum())

    steps = collect(dataset_of(LENGTHS), round_robin(1), num_steps=3, static_bytes=static_bytes)
    assert [data.static_bytes for data in steps] == [data.batch.num_tokens for data in steps]
    assert set(threads) == {"bytescale-loader"}
    assert collect(dataset_of(LENGTHS), round_robin(1), num_steps=1)[0].static_bytes is None


def test_stopping_early_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def stuck(lengths: np.ndarray) -> StepPlan:
        release.wait(60)
        return round_robin(1)(lengths)

    monkeypatch.setattr("bytescale.data.steps.CLOSE_TIMEOUT_S", 0.1)
    began = time.monotonic()
    with StepLoader(dataset_of(LENGTHS), BatchConfig(sequences=2), 0, stuck, 0):
        pass
    assert time.monotonic() - began < 5
    assert all(thread.daemon for thread in loader_threads())
    release.set()
    for thread in loader_threads():
        thread.join(10)

    loader = StepLoader(dataset_of(LENGTHS), BatchConfig(sequences=2), 0, round_robin(1), 0)
    next(loader)
    loader.close()
    loader.close()
    assert list(loader) == []
    assert not loader_threads()


def test_batches_without_a_target_are_passed_over() -> None:
    # Documents of 5 tokens cut at 4: half of the sequences are one end token without a target.
    dataset = build_dataset(corpus_of([5] * 6), max_context=4)
    with StepLoader(dataset, BatchConfig(sequences=1), 0, round_robin(1), 0, num_steps=12) as loader:
        steps = list(loader)
    assert [data.step for data in steps] == list(range(1, 13))
    assert all(data.batch.total_targets == 3 for data in steps)
    # Two epochs of 6 sequences with targets, and what lay between them.
    (state,) = steps[-1].state_after.sources
    passed = 12 * state.epoch + state.position - 12
    assert loader.skipped_steps == passed > 0
    assert steps[0].state_after != LoaderState()
