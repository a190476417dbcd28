"""Tensor parallelism through the command line: losses and model of one process, and what is refused before ranks."""

import json
from pathlib import Path

import pytest
import torch

from bytescale.config.overrides import parse_overrides
from bytescale.config.toml import load_config
from bytescale.errors import UserError
from bytescale.runtime.device import Machine
from bytescale.train.prepare import prepare
from tests.traces import check_trace
from tests.train.runs import metrics, train, weights, write_run


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("tensor"))


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "pp_size", "tp_size"), [(4, 1, 2), (4, 2, 2)])
def test_command_line_losses_agree(config_path: Path, nproc: int, pp_size: int, tp_size: int) -> None:
    short = ("--train.steps", 4, "--plan.tokens_per_rank", 300 * (1 + (pp_size == 2)))
    alone, run_dir = config_path.parent / "alone", config_path.parent / f"{pp_size}x{tp_size}"
    if not alone.exists():
        done = train(config_path, "--run.dir", alone, "--train.steps", 4, "--plan.tokens_per_rank", 600)
        assert done.returncode == 0, done.stderr
    axes = ("--parallel.pp_size", pp_size, "--parallel.tp_size", tp_size)
    done = train(config_path, "--nproc", nproc, "--run.dir", run_dir, *axes, *short)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{nproc // pp_size // tp_size} HDP rank" in done.stdout and "2 TP ranks" in done.stdout
    for ours, theirs in zip(metrics(run_dir), metrics(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        # Waiting for the reduction is no work: with it taken off, a rank could seem to have done less than none.
        assert 1 <= ours["imbalance"] < nproc and ours["tensor_bytes"] > 0
        assert (ours["tokens"], ours["sequences"]) == (theirs["tokens"], theirs["sequences"])
    ours, theirs = weights(run_dir), weights(alone)
    assert set(ours) == set(theirs)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=5e-3 * float(weight.abs().max()))
    check_trace((run_dir / "trace.json").read_text())
    assert json.loads((run_dir / "summary.json").read_text())["num_parameters"] == sum(
        w.numel() for w in theirs.values()
    )


@pytest.mark.parametrize(
    ("words", "nproc", "line"),
    [
        (
            ("--parallel.tp_size=3",),
            3,
            "tp_size = 3 does not divide num_attention_heads = 4 .* divides all sizes is 2$",
        ),
        (
            ("--parallel.tp_size=4",),
            4,
            "tp_size = 4 does not divide num_key_value_heads = 2 .* divides all sizes is 2$",
        ),
        (("--parallel.tp_size=2", "--model.config.intermediate_size=65"), 2, "does not divide intermediate_size = 65"),
        (
            ("--parallel.tp_size=2", "--model.config.model_type=mixtral", "--model.config.num_local_experts=5"),
            2,
            "does not divide num_local_experts = 5 of model 'mixtral'",
        ),
        (("--parallel.tp_size=2", "--model.config.model_type=phi3"), 2, r"qkv_proj: colwise_gather_output\); set"),
        (
            ("--parallel.tp_size=2", "--model.config.model_type=stablelm"),
            2,
            "'stablelm' has no tensor-parallel plan in",
        ),
        (("--parallel.tp_size=2",), 3, r"a world of 3 ranks cannot be cut into pp_size \* tp_size = 1 \* 2"),
        (("--parallel.tp_size=2", "--plan.profile=profile.json"), 2, "profile.json"),
    ],
)
def test_what_cannot_be_split_is_one_line(config_path: Path, words: tuple[str, ...], nproc: int, line: str) -> None:
    overrides, _ = parse_overrides(words)
    with pytest.raises(UserError, match=line) as refused:
        prepare(load_config(config_path, overrides), nproc)
    assert len(str(refused.value)) <= 360 and "\n" not in str(refused.value)


def test_tensor_parallel_ranks_are_on_one_machine(config_path: Path) -> None:
    overrides, _ = parse_overrides(("--parallel.tp_size=2",))
    with pytest.raises(UserError, match=r"tp_size = 2 does not divide the 3 ranks of this machine, .* that does is 1$"):
        prepare(load_config(config_path, overrides), 6, Machine(num_gpus=0, num_ranks=3))
