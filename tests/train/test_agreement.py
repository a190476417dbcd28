"""Ranks that would train different things are told apart before the first step, and named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bytescale.config.schema import Config
from bytescale.config.toml import load_config
from bytescale.data import build_dataset
from bytescale.errors import UserError
from bytescale.train.agreement import check_same_run, dataset_digest, run_facts, step_digest, weights_digest
from tests.data.corpora import corpus_of, dataset_of
from tests.plans import columns_of, drawn, rebuilt
from tests.ranks import RankPool, Ranks
from tests.runtime.models import step_data, world_of
from tests.train.runs import write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load_config(write_run(tmp_path_factory.mktemp("agreement")))


def _compare(ranks: Ranks, configs: list[Config], lengths: list[list[int]], weights: list[str], pp_size: int) -> str:
    facts = run_facts(configs[ranks.rank], dataset_of(lengths[ranks.rank]))
    try:
        check_same_run(world_of(ranks, pp_size=pp_size), facts, weights[ranks.rank])
    except UserError as error:
        return str(error)
    return ""


def test_what_differs_between_ranks_is_named(ranks: RankPool, config: Config) -> None:
    def complaints(
        others: Config = config, lengths: list[int] | None = None, weights: list[str] | None = None, pp_size: int = 1
    ) -> set[str]:
        data = [[2, 9, 3], [2, 9, 3], [2, 9, 3], lengths or [2, 9, 3]]
        configs = [config, config, config, others]
        return set(ranks.run(4, _compare, configs, data, weights or ["a"] * 4, pp_size))

    def changed(section: str, **values: Any) -> Config:
        return replace(config, **{section: replace(getattr(config, section), **values)})

    assert complaints() == {""}
    # Places and what one machine can spare are its own business.
    own = replace(changed("train", compute_threads=2), run=replace(config.run, dir="/elsewhere"))
    assert complaints(replace(own, data=replace(config.data, path="/mnt/corpus.jsonl"))) == {""}
    for other, words in (
        (changed("train", lr=0.1), "rank 3 differs from rank 0 in train.lr: 0.1 against 0.002"),
        (changed("train", grad_clip=0.0), "rank 3 differs from rank 0 in train.grad_clip: 0.0 against 1.0"),
        (changed("train", weight_decay=0.5), "in train.weight_decay: 0.5 against 0.1"),
    ):
        (line,) = complaints(other)
        assert words in line and len(line) <= 240
    (line,) = complaints(lengths=[2, 9, 4])
    assert "rank 3 differs from rank 0 in its data" in line
    (line,) = complaints(weights=["a", "a", "a", "b"])
    assert "rank 3 differs from rank 0 in its start weights (digest): b against a" in line
    # Stages hold other weights; the ranks of one stage hold the same.
    assert complaints(weights=["a", "a", "b", "b"], pp_size=2) == {""}
    (line,) = complaints(weights=["a", "a", "b", "c"], pp_size=2)
    assert "rank 3 differs from rank 2 in its start weights" in line


def test_digests_see_what_they_should() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    before = weights_digest(model)
    assert weights_digest(model) == before
    with torch.no_grad():
        model[1].bias += 1e-7
    assert weights_digest(model) != before
    data, corpus = dataset_of([4, 5]), corpus_of([4, 5])
    other = build_dataset(replace(corpus, tokens=corpus.tokens * 2), max_context=9)
    assert dataset_digest(data) == dataset_digest(dataset_of([4, 5])) != dataset_digest(other)


def test_the_digest_of_a_step_covers_sequences_placement_and_offloading() -> None:
    plan = drawn("6 7", "0 | 1[0/2]", "1[1/2]")
    data = step_data(plan, 0)
    other_sequences = replace(data, batch=replace(data.batch, sequence_ids=data.batch.sequence_ids + 1))
    ratio = rebuilt(plan, columns_of(plan) | {"offload_ratio": [0.5, 0.0, 0.0]})
    moved = drawn("6 7", "1[0/2]", "1[1/2] | 0")
    digests = {step_digest(d) for d in (data, other_sequences, step_data(ratio, 0), step_data(moved, 0))}
    assert len(digests) == 4
    assert step_digest(data) == step_digest(step_data(plan, 1))
