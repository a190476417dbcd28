"""Evaluation on held-out documents: the same loss on any ranks, and training that does not notice it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from bytescale import cli
from bytescale.cli.results.run_list import find_runs
from bytescale.config.schema import BatchConfig, Config, EvalConfig, ParallelConfig
from bytescale.config.toml import load_config
from bytescale.data import GlobalBatch, StepLoader, cut_batch
from bytescale.errors import UserError
from bytescale.report import read_summary
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.model.decoder import build_decoder
from bytescale.runtime.sharded import whole_tensor
from bytescale.runtime.world import World
from bytescale.train.checks import check_first
from bytescale.train.evaluation.evaluate import evaluate
from bytescale.train.optimizer import make_optimizer
from bytescale.train.prepare import prepare
from bytescale.train.step import run_step
from bytescale.train.trainer import build_model
from tests.ranks import RankPool, Ranks
from tests.runtime.models import world_of
from tests.test_writers import scalars
from tests.train.runs import metrics, train, weights, write_run
from tests.train.test_parity import free_planner, with_options


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("evaluation"))
    random = np.random.default_rng(1)
    lengths = [1, 590, 350, *random.integers(2, 200, 20).tolist()]
    documents = ["".join(random.choice(list("abcde \n"), int(n))) for n in lengths]
    held_out = path.parent / "held-out.jsonl"
    held_out.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    path.write_text(f'{path.read_text()}\n[eval]\nevery = 2\npath = "{held_out}"\n')
    return path


@pytest.fixture(scope="module")
def config(config_path: Path) -> Config:
    return with_options(load_config(config_path), layers=5)


@pytest.fixture(scope="module")
def expected(config: Config) -> float:
    """By Transformers' own attention, a sequence at a time."""
    prepared = prepare(config, 4)
    assert prepared.held_out is not None
    decoder = build_decoder(config.model, prepared.model_config, config.train.seed).double()
    decoder.set_attn_implementation("eager")
    dataset, total = prepared.held_out.dataset, 0.0
    for number in range(len(dataset)):
        tokens = torch.from_numpy(dataset.read(number, 0, int(dataset.lengths[number])))
        with torch.no_grad():
            logits = decoder(tokens[None]).logits[0, :-1]
        total += float(functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return total / int(dataset.num_targets.sum())


def _world(ranks: Ranks, config: Config) -> World:
    sizes = config.parallel
    return world_of(ranks, pp_size=sizes.pp_size, tp_size=sizes.tp_size, shard_size=sizes.shard_size)


def _evaluated(ranks: Ranks, config: Config, chunks: bool = False) -> tuple[float, int]:
    prepared, world = (
        prepare(config, ranks.size),
        _world(ranks, config),
    )
    if chunks:
        prepared = replace(prepared, planner=free_planner(config, world.hdp_size))
    assert prepared.held_out is not None
    layouts = {prepared.planner(batch.lengths).layout for batch in prepared.held_out.batches}
    assert ("chunks" in layouts) == chunks
    model = build_model(config, prepared, world.stage)
    shard_model(model, world, torch.float32)
    found = evaluate(model, CpuKernel(), world, prepared, prepared.held_out)
    assert found is not None and model.training
    assert all(p.grad is None for p in model.parameters())
    return found.loss, found.tokens


@pytest.mark.parametrize(
    ("size", "parallel", "plan"),
    [
        (1, ParallelConfig(), {"tokens_per_rank": 600}),
        (2, ParallelConfig(), {"strategy": "hdp-naive"}),
        (2, ParallelConfig(), {"offload": 1.0}),
        (3, ParallelConfig(), {}),
        (4, ParallelConfig(shard_size=2), {}),
        (2, ParallelConfig(pp_size=2), {"tokens_per_rank": 600}),
        (4, ParallelConfig(pp_size=2), {}),
        (6, ParallelConfig(pp_size=2), {"strategy": "hdp-balance"}),
        (4, ParallelConfig(tp_size=2), {}),
        (8, ParallelConfig(pp_size=2, tp_size=2), {}),
    ],
)
def test_the_loss_is_the_same_on_any_ranks(
    ranks: RankPool, config: Config, expected: float, size: int, parallel: ParallelConfig, plan: dict[str, Any]
) -> None:
    asked = replace(with_options(config, layers=5, **plan), parallel=parallel)
    found = ranks.run(size, _evaluated, asked)
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("size", "capacity"), [(2, 600), (4, 300)])
def test_sequences_in_chunks_run_forward_alone(
    ranks: RankPool, config: Config, expected: float, size: int, capacity: int
) -> None:
    asked = with_options(config, layers=5, pp_size=2, strategy="chunked", tokens_per_rank=capacity)
    for loss, _ in ranks.run(size, _evaluated, asked, True):
        assert loss == pytest.approx(expected, rel=1e-5)


def _trained(ranks: Ranks, config: Config, evaluates: bool) -> tuple[list[float], list[torch.Tensor], list[float]]:
    prepared, world = (
        prepare(config, ranks.size),
        _world(ranks, config),
    )
    assert prepared.held_out is not None
    model, kernel = build_model(config, prepared, world.stage), CpuKernel()
    shard_model(model, world, torch.float32)
    optimizer = make_optimizer(model, config.train)
    losses, evaluations = [], []
    loader = StepLoader(prepared.dataset, config.batch, 0, prepared.planner, world.hdp_rank, num_steps=3)
    with loader:
        for data in loader:
            losses.append(run_step(model, kernel, world, data).loss_sum)
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                found = evaluate(model, kernel, world, prepared, prepared.held_out)
                assert found is not None
                evaluations.append(found.loss)
    return losses, [whole_tensor(p.detach()).clone() for p in model.parameters()], evaluations


def test_training_goes_on_as_if_nothing_had_been_evaluated(ranks: RankPool, config: Config) -> None:
    asked = with_options(config, pp_size=2)
    asked = replace(asked, train=replace(asked.train, activation_checkpointing="full"), batch=BatchConfig(tokens=1200))
    asked = replace(asked, eval=replace(asked.eval, tokens=1200))
    for (alone, expected, _), (beside, same, evaluations) in zip(
        ranks.run(4, _trained, asked, False), ranks.run(4, _trained, asked, True), strict=True
    ):
        assert alone == beside
        assert all(torch.equal(a, b) for a, b in zip(expected, same, strict=True))
        assert evaluations[2] < evaluations[0]


def _stopped(ranks: Ranks, config: Config) -> bool:
    prepared, world = prepare(config, ranks.size), world_of(ranks)
    assert prepared.held_out is not None
    model = build_model(config, prepared)
    shard_model(model, world, torch.float32)
    answers: Iterator[bool] = iter([False, ranks.rank == 1, False, False])
    return evaluate(model, CpuKernel(), world, prepared, prepared.held_out, lambda: next(answers)) is None


def test_a_request_to_stop_ends_an_evaluation_on_all_ranks(ranks: RankPool, config: Config) -> None:
    assert ranks.run(2, _stopped, config) == [True, True]


def test_an_evaluation_takes_the_same_sequences_whatever_the_seed(config: Config) -> None:
    def ids(seed: int, **limits: int) -> tuple[list[int], int]:
        asked = replace(
            config, train=replace(config.train, seed=seed), eval=EvalConfig(path=config.eval.path, **limits)
        )
        held_out = prepare(asked, 4).held_out
        assert held_out is not None
        return np.concatenate([b.sequence_ids for b in held_out.batches]).tolist(), held_out.num_targets

    everything, num_targets = ids(0)
    assert sorted(everything) == list(range(23)) and ids(7) == (everything, num_targets)
    assert ids(3, sequences=5)[0] == everything[:5]
    some, few_targets = ids(3, tokens=800)
    assert some == everything[: len(some)] and 0 < few_targets < 800
    assert (
        ids(
            0,
            sequences=10**6,
        )[0]
        == ids(0, tokens=10**9)[0]
        == everything
    )


def test_a_share_of_the_data_can_be_held_out(config: Config) -> None:
    asked = replace(config, data=replace(config.data, validation=0.2), eval=EvalConfig(every=1))
    check_first(asked, 4)
    prepared = prepare(asked, 4)
    assert prepared.held_out is not None
    held_out, trained = prepared.held_out.dataset, prepared.dataset
    assert held_out.counts.documents + trained.counts.documents == 200
    assert 20 < held_out.counts.documents < 60
    assert not set(held_out.reader.starts.tolist()) & set(trained.reader.starts.tolist())
    own = prepare(replace(asked, eval=config.eval), 4).held_out
    assert own is not None and len(own.dataset) == 23


def test_a_batch_is_cut_into_batches() -> None:
    lengths = np.array([5, 3, 9, 1, 1, 1])
    batch = GlobalBatch(np.arange(6), lengths, lengths - 1)
    assert [b.lengths.tolist() for b in cut_batch(batch, BatchConfig(tokens=8))] == [[5, 3], [9], [1, 1, 1]]
    assert [b.sequence_ids.tolist() for b in cut_batch(batch, BatchConfig(sequences=4))] == [[0, 1, 2, 3], [4, 5]]


def test_what_cannot_be_evaluated_is_refused(config: Config) -> None:
    def refusal(**settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            check_first(replace(config, eval=EvalConfig(**settings)), 4)
        return str(caught.value)

    assert refusal(every=5) == "eval.every = 5 has nothing to evaluate; set data.validation, such as 0.01, or eval.path"
    assert refusal(path="/nowhere.jsonl") == "held-out documents: eval.path = /nowhere.jsonl does not exist"
    tree = refusal(path="/etc/hosts", source="text-tree")
    assert tree.startswith("held-out documents: eval.path = /etc/hosts is not a directory")
    with pytest.raises(UserError, match=r'eval.source = "jsonl" needs eval\.path'):
        EvalConfig(source="jsonl")
    with pytest.raises(UserError, match="tokens or sequences"):
        EvalConfig(tokens=1, sequences=1)
    few_ranks = replace(config, plan=replace(config.plan, tokens_per_rank=550, offload="off"))
    short = Path(str(config.eval.path)).with_name("short.jsonl")
    short.write_text('{"text": "abc"}\n')
    with pytest.raises(UserError, match=r"^held-out sequence 1 has 591 tokens and needs 2 ranks"):
        prepare(replace(few_ranks, data=replace(few_ranks.data, path=str(short))), 1)


@pytest.mark.long
def test_evaluations_of_a_run(config_path: Path) -> None:
    """Through the command line: on the screen, in the metrics, in the summary; losses as without them."""
    run_dir, steps = config_path.parent / "with", ("--train.steps", 5)
    words = ("--run.dir", run_dir, "--run.writers", "tensorboard", "--checkpoint.every", 3)
    done = train(config_path, "--nproc", 2, *words, *steps)
    assert done.returncode == 0, done.stderr
    assert "evaluation every 2 steps and after the last: all held-out sequences" in done.stdout
    without = config_path.with_name("without.toml")
    without.write_text(config_path.read_text().split("[eval]")[0])
    assert train(without, "--nproc", 2, "--run.dir", config_path.parent / "without", *steps).returncode == 0
    found, bare = metrics(run_dir), metrics(config_path.parent / "without")
    assert [(step["loss"], step["grad_norm"]) for step in found] == [(s["loss"], s["grad_norm"]) for s in bare]
    losses = {step["step"]: step["eval_loss"] for step in found if "eval_loss" in step}
    assert list(losses) == [2, 4, 5]
    assert f"step 4/5  held-out loss {losses[4]:.4f}" in done.stdout
    values = scalars(run_dir)
    assert values["eval_loss"] == [(step, pytest.approx(loss)) for step, loss in losses.items()]
    assert values["loss"] == [(step["step"], pytest.approx(step["loss"])) for step in found]
    (run,) = find_runs(run_dir)
    assert (run.state, run.step, run.eval_loss, run.checkpoints) == ("finished", 5, losses[5], (3, 5))
    assert cli.main(["export", str(run_dir), str(config_path.parent / "exported")]) == 0
    exported, saved = (
        load_file(config_path.parent / "exported" / "model.safetensors"),
        weights(run_dir),
    )
    assert {name: bool((exported[name] == saved[name]).all()) for name in exported} == dict.fromkeys(saved, True)
    summary = read_summary(run_dir / "summary.json")
    assert (summary.num_evaluations, summary.eval_loss_first, summary.eval_loss_last) == (3, losses[2], losses[5])
    assert f"{losses[2]:.4f} / {losses[5]:.4f}, best {min(losses.values()):.4f} of 3" in done.stdout
