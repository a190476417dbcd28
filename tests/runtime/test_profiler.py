"""The profiler measures the right thing: one layer, each storage once, both ends of a link, both ways of a tier."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale.cli import main
from bytescale.config.schema import ModelConfig
from bytescale.cost.profile import read_profile
from bytescale.profiler.measure import (
    LINK_BYTES,
    Clock,
    length_grid,
    measure_activations,
    measure_blocks,
    measure_copies,
    measure_embedding,
    measure_head,
    measure_layer,
    measure_link,
    two_layers,
)
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.model.hf_config import load_model_config, shape_of_config
from bytescale.runtime.offload.disk import DiskTier
from bytescale.runtime.p2p import PeerToPeer
from tests.processes import run_command
from tests.ranks import RankPool, Ranks
from tests.runtime.models import ARCHITECTURES, SIZES
from tests.train.runs import environment, train, write_run

CPU = torch.device("cpu")


def config_of(architecture: str) -> Any:
    return load_model_config(
        ModelConfig(config={"model_type": architecture, **SIZES, **ARCHITECTURES[architecture]}), 4096
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_a_layer_of_every_architecture(architecture: str) -> None:
    model = two_layers(config_of(architecture), CPU, torch.float32)
    table = measure_layer(model, CpuKernel(), [16, 512], Clock(CPU), 2)
    assert table["length"] == [16.0, 512.0]
    for column in ("forward_s", "backward_s"):
        assert 0 < table[column][0] < table[column][1]


def test_activations_count_each_storage_once() -> None:
    config = config_of("llama")
    shape = shape_of_config(config, 4)
    found = measure_activations(two_layers(config, CPU, torch.float32), CpuKernel(), [64, 128], Clock(CPU))
    per_token = (found["num_bytes"][1] - found["num_bytes"][0]) / 64
    statistics = 4 * (2 + shape.num_heads) + 2 * 4 * shape.head_dim  # both norms, log-sum-exp, rotary tables
    assert per_token == pytest.approx(shape.activation_bytes_per_token + statistics, rel=0.05)


def test_blocks_and_head_fill_their_tables() -> None:
    shape, like = shape_of_config(config_of("llama"), 4), torch.empty(0)
    blocks = measure_blocks(shape, CpuKernel(), [16, 64], Clock(CPU), 1, like)
    assert list(zip(blocks["q_len"], blocks["kv_len"], strict=True)) == [(16, 16), (16, 64), (64, 16), (64, 64)]
    head = measure_head(shape, [32, 64], Clock(CPU), 1, like)
    embedding = measure_embedding(shape, 64, Clock(CPU), 1, like)
    assert min(*embedding["forward_token_s"], *embedding["backward_token_s"]) > 0
    assert min(*blocks["forward_s"], *blocks["backward_s"], *head["forward_s"], *head["backward_s"]) > 0


def _link(ranks: Ranks) -> Any:
    if ranks.rank > 1:
        return None
    return measure_link(PeerToPeer(ranks.group, 30.0, CPU), 1 - ranks.rank, CPU, Clock(CPU, waiting_counts=True))


def test_a_link_is_measured_from_both_ends(ranks: RankPool) -> None:
    for table in ranks.run(2, _link):
        assert table["num_bytes"] == list(LINK_BYTES)
        assert 0 < table["time_s"][0] < table["time_s"][-1]


def test_copies_through_the_disk_tier(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 30)
    rates = measure_copies(tier, CPU)
    tier.close()
    assert all(rate > 0 for (rate,) in rates.values())


def test_the_grid_holds_out_points_between() -> None:
    lengths, held_out = length_grid(4096)
    assert (lengths[0], lengths[-1]) == (256, 4096)
    assert len(held_out) >= 2
    assert not set(held_out) & set(lengths)
    assert length_grid(1024)[0][-1] == 1024


def test_profile_then_train_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_path, out = write_run(tmp_path), tmp_path / "profile.json"
    options = ["--data.max_context", 600]
    done = profile(config_path, "--out", out, "--max-length", 1024, "--rounds", 1, *options)
    assert done.returncode == 0, done.stderr
    made = read_profile(out)
    assert (made.device, made.longest, made.model.hidden_size) == ("cpu", 1024, 32)
    assert (tmp_path / "profile.html").read_text().startswith("<!doctype html>")
    run = train(config_path, "--plan.profile", out, "--train.steps", 1, "--plan.tokens-per-rank", 600)
    assert run.returncode == 0, run.stderr
    assert "profile measured 256 to 1024 tokens" in run.stdout + run.stderr
    other = ["--plan.profile", str(out), "--model.config.hidden_size", "64", "--run.dir", str(tmp_path / "other")]
    assert main(["train", str(config_path), *other]) == 2
    assert "is of another model: hidden_size is 32 there and 64 here" in capsys.readouterr().err


def profile(*arguments: object) -> Any:
    return run_command(["profile", *arguments], environment(), 110)
