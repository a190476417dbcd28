"""The same configuration on any number of ranks and with any strategy trains the same model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale.config.schema import Config
from bytescale.config.toml import load_config
from bytescale.cost import dense_flops
from bytescale.data import StepLoader
from bytescale.planner import plan
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.fsdp import shard_model
from bytescale.train.prepare import Planner, prepare
from bytescale.train.step import run_step
from bytescale.train.trainer import build_model
from tests.ranks import RankPool, Ranks
from tests.runtime.models import whole_gradients, world_of
from tests.train.runs import metrics, train, weights, write_run

pytestmark = pytest.mark.long

STRATEGIES = ["static", "hdp-naive", "hdp-balance", "best", "megatron-hybrid", "megatron-dynamic", "flexible-cp"]
ON_THE_COMMAND_LINE = [
    *((nproc, strategy) for nproc in (2, 3, 4, 6) for strategy in ("static", "hdp-naive")),
    (4, "hdp-balance"),
    (3, "best"),
]
STEPS = 8
SHORT = ("--train.steps", STEPS)


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def alone(config_path: Path) -> Path:
    """The run directory of one process."""
    run_dir = config_path.parent / "alone"
    done = train(config_path, "--run.dir", run_dir, "--plan.tokens-per-rank", 600, *SHORT)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.parametrize(("nproc", "strategy"), ON_THE_COMMAND_LINE)
def test_command_line_losses_agree(config_path: Path, alone: Path, nproc: int, strategy: str) -> None:
    run_dir = config_path.parent / f"{strategy}-{nproc}"
    done = train(config_path, "--nproc", nproc, "--run.dir", run_dir, "--plan.strategy", strategy, *SHORT)
    assert done.returncode == 0, done.stderr
    expected, found = metrics(alone), metrics(run_dir)
    assert len(found) == len(expected) == STEPS
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert (ours["tokens"], ours["sequences"]) == (theirs["tokens"], theirs["sequences"])
    # 600 tokens need 2 ranks of 300; `static` takes the least divisor of the ranks that is at least that.
    if strategy != "best":
        assert max(step["cp_degree_max"] for step in found) == (3 if (strategy, nproc) == ("static", 3) else 2)
    ours, theirs = weights(run_dir), weights(alone)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=5e-3 * float(weight.abs().max()))


@pytest.mark.parametrize(("nproc", "pp_size"), [(2, 2), (4, 2)])
def test_pipelines_agree_through_the_command_line(config_path: Path, alone: Path, nproc: int, pp_size: int) -> None:
    run_dir = config_path.parent / f"pipeline-{nproc}"
    options = ["--parallel.pp_size", pp_size, "--plan.tokens_per_rank", 600 * pp_size // nproc]
    done = train(config_path, "--nproc", nproc, "--run.dir", run_dir, *options, *SHORT)
    assert done.returncode == 0, done.stderr
    expected, found = metrics(alone), metrics(run_dir)
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert found[-1]["pp_bubble"] > 0
    ours, theirs = weights(run_dir), weights(alone)
    assert set(ours) == set(theirs)


def _gradients(
    ranks: Ranks, config: Config, num_steps: int = 2, layout: str | None = None
) -> list[dict[str, torch.Tensor]]:
    """Whole gradients of the first batches on this stage, at the initial weights.

    With `layout` planned by a cost without communication, where chunks pay, and one of the plans must have it.
    """
    parallel = config.parallel
    prepared, world = prepare(config, ranks.size), world_of(ranks, pp_size=parallel.pp_size, tp_size=parallel.tp_size)
    if layout is not None:
        prepared = replace(prepared, planner=free_planner(config, world.hdp_size))
    model = build_model(config, prepared, world.stage)
    shard_model(model, world, torch.float32)
    results, layouts = [], set()
    with StepLoader(prepared.dataset, config.batch, 0, prepared.planner, world.hdp_rank, num_steps=num_steps) as loader:
        for data in loader:
            layouts.add(data.plan.layout)
            run_step(model, CpuKernel(), world, data)
            results.append(whole_gradients(model))
            model.zero_grad()
    assert layout is None or layout in layouts
    return results


def free_planner(config: Config, hdp_size: int) -> Planner:
    cost = dense_flops(5)
    fixed = {"hdp_size": hdp_size, "pp_size": config.parallel.pp_size, "cost": cost}
    return lambda lengths: plan(
        lengths,
        config.plan.strategy,
        tokens_per_rank=config.plan.tokens_per_rank,
        **fixed,  # type: ignore[arg-type]
    )


def check_gradients(found: list[Any], expected: list[dict[str, torch.Tensor]]) -> None:
    """Every rank's gradients are those of one process; together they are all of them."""
    seen = set()
    for per_rank in found:
        for ours, theirs in zip(per_rank, expected, strict=True):
            seen |= set(ours)
            for name, gradient in ours.items():
                assert (gradient - theirs[name]).abs().max() <= 1e-5 * theirs[name].abs().max(), name
    assert seen == set(expected[0])


def with_options(config: Config, layers: int = 2, pp_size: int = 1, tp_size: int = 1, **plan: Any) -> Config:
    model = replace(config.model, config={**(config.model.config or {}), "num_hidden_layers": layers})
    parallel = replace(config.parallel, pp_size=pp_size, tp_size=tp_size)
    return replace(config, model=model, parallel=parallel, plan=replace(config.plan, **plan))


def test_every_gradient_agrees(ranks: RankPool, config_path: Path) -> None:
    config = load_config(config_path)
    expected = ranks.run(1, _gradients, with_options(config, tokens_per_rank=600))[0]
    for strategy in STRATEGIES:
        for size in (2, 3, 4, 6) if not strategy.startswith("megatron") else (2, 4):
            check_gradients(ranks.run(size, _gradients, with_options(config, strategy=strategy)), expected)


def test_every_gradient_agrees_with_tensor_parallelism(ranks: RankPool, config_path: Path) -> None:
    """2x2 and 3x2 HDP x TP ranks, and two stages of 2x2; chunks in pipelines."""
    config = load_config(config_path)
    expected = ranks.run(1, _gradients, with_options(config, tokens_per_rank=600))[0]
    for strategy in ("static", "hdp-balance", "best"):
        for size, pp_size in ((4, 1), (6, 1), (8, 2)):
            options = with_options(config, pp_size=pp_size, tp_size=2, strategy=strategy)
            check_gradients(ranks.run(size, _gradients, options), expected)
    expected = ranks.run(1, _gradients, with_options(config, layers=5, tokens_per_rank=600), 3)[0]
    options = with_options(config, layers=5, pp_size=2, tp_size=2, strategy="chunked")
    check_gradients(ranks.run(8, _gradients, options, 3, "chunks"), expected)


def test_every_gradient_agrees_in_pipelines(ranks: RankPool, config_path: Path) -> None:
    """2x1, 2x2, 4x1 and 3x2 stages x pipelines; five layers, which none of them divides."""
    config = with_options(load_config(config_path), layers=5)
    expected = ranks.run(1, _gradients, with_options(config, layers=5, tokens_per_rank=600))[0]
    for strategy in ("static", "hdp-naive", "hdp-balance", "best"):
        for size, pp_size in ((2, 2), (4, 2), (4, 4), (6, 3)):
            capacity = 600 if size == pp_size else 300
            options = with_options(config, layers=5, pp_size=pp_size, strategy=strategy, tokens_per_rank=capacity)
            check_gradients(ranks.run(size, _gradients, options), expected)


def test_every_gradient_agrees_in_chunks(ranks: RankPool, config_path: Path) -> None:
    config = with_options(load_config(config_path), layers=5)
    expected = ranks.run(1, _gradients, with_options(config, layers=5, tokens_per_rank=600), 3)[0]
    for size, pp_size in ((2, 2), (4, 2), (6, 3)):
        capacity = 600 if size == pp_size else 300
        options = with_options(config, layers=5, pp_size=pp_size, strategy="chunked", tokens_per_rank=capacity)
        check_gradients(ranks.run(size, _gradients, options, 3, "chunks"), expected)


def test_bf16_and_checkpointing_through_the_command_line(config_path: Path, alone: Path) -> None:
    run_dir = config_path.parent / "bf16"
    options = ["--train.dtype", "bfloat16", "--train.activation_checkpointing", "full", "--train.steps", 5]
    done = train(config_path, "--nproc", 3, "--run.dir", run_dir, *options)
    assert (done.returncode, done.stderr) == (0, "")
    for ours, theirs in zip(metrics(run_dir)[:2], metrics(alone), strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
    assert weights(run_dir)["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_saved_model_can_be_trained_further(config_path: Path, alone: Path) -> None:
    run_dir = config_path.parent / "further"
    path = config_path.parent / "further.toml"
    text = config_path.read_text()
    path.write_text(f'[model]\npath = "{alone / "model"}"\n' + text[text.index("[data]") :])
    done = train(path, "--nproc", 2, "--run.dir", run_dir, "--train.steps", 2)
    assert done.returncode == 0, done.stderr
    assert metrics(run_dir)[0]["loss"] < metrics(alone)[-1]["loss"] + 0.2
