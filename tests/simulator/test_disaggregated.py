"""Attention as tasks: every query once, loads within the tolerance, bytes counted by hand, and when it is worth it."""

import numpy as np
import pytest

from bytescale.cost import head_exchange, lower_bound_s, model_shape, preset_cost
from bytescale.cost.micro_batch import Ulysses
from bytescale.cost.model import Link
from bytescale.errors import UserError
from bytescale.simulator.disaggregated import (
    Tasks,
    balanced,
    cut_to_ranks,
    deal,
    simulate_disaggregated,
    traffic_bytes,
)
from tests.planner.inputs import lognormal
from tests.simulator.plans import linear_cost

COST, HEADS = preset_cost("llama-7b", "paper"), head_exchange(model_shape("llama-7b"))


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("seed", range(6))
def test_tasks_cover_every_query_once_and_loads_are_near_the_mean(seed: int) -> None:
    lengths = np.minimum(lognormal(400, 4096, seed), 8 * 8192)
    for documents in deal(lengths, 16, 8192):
        assert int(lengths[documents].sum()) <= 16 * 8192
        cut = cut_to_ranks(lengths, documents, 16)
        held = np.bincount(cut.home, weights=cut.end - cut.begin, minlength=16)
        assert held.max() - np.sort(held)[1] <= 16
        tasks, load = balanced(cut, COST, HEADS, 16, 0.1)
        assert load.max() <= 1.1 * load.mean()
        for document in documents.tolist():
            mine = tasks.document == document
            order = np.argsort(tasks.begin[mine])
            begin, end = tasks.begin[mine][order], tasks.end[mine][order]
            assert [0, *end.tolist()] == [*begin.tolist(), int(lengths[document])]


def test_bytes_are_those_of_queries_outputs_and_keys_away_from_their_rank() -> None:
    # Rank 1 holds tokens 4-8 and runs 6-8 on rank 2: it needs keys 0-4, rank 2 all of 0-8.
    tasks = Tasks(tokens(0, 0, 0), tokens(0, 4, 6), tokens(4, 6, 8), tokens(0, 1, 1), tokens(0, 1, 2))
    cost = linear_cost(square=1.0, link=Link(0.0, 1.0))
    num_bytes, most = traffic_bytes(tasks, cost, Ulysses(1, 1, 10.0), 3)
    kv = cost.kv_bytes_per_token
    assert num_bytes.tolist() == [0.0, 4 * kv + 2 * 5.0, 8 * kv + 2 * 5.0]
    assert most == 8


def test_short_documents_run_near_the_bound_and_one_giant_exposes_its_keys() -> None:
    many = np.full(2048, 2048)
    asked = {"hdp_size": 64, "tokens_per_rank": 8192}
    even = simulate_disaggregated(many, COST, HEADS, **asked)
    assert even.exposed_s == 0.0
    assert even.step_time_s <= 1.01 * lower_bound_s(COST, many, 64)
    giant = simulate_disaggregated(tokens(64 * 8192, *[512] * 512), COST, HEADS, **asked)
    assert giant.received_tokens > 0.9 * 64 * 8192


def test_a_pipeline_fills_and_drains() -> None:
    many = np.full(8 * 64, 8192)
    cost = preset_cost("llama-7b", "paper")
    alone = simulate_disaggregated(many, cost, HEADS, hdp_size=64, tokens_per_rank=8192)
    piped = simulate_disaggregated(many, cost, HEADS, hdp_size=16, tokens_per_rank=8192, pp_size=4)
    assert alone.num_micro_batches == 8 and piped.num_micro_batches == 32
    # As much work on as many ranks, 35 ticks for 32.
    assert 1.0 < piped.step_time_s / alone.step_time_s < 35 / 32 * 1.15


def test_a_document_beyond_all_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="does not fit 2 ranks"):
        simulate_disaggregated(tokens(300), COST, HEADS, hdp_size=2, tokens_per_rank=100)
