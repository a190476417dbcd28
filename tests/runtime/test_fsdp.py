"""Model states: evenly stored on any number of ranks; the same gradients and update whatever the shards."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from bytescale.config.schema import ParallelConfig, TrainConfig
from bytescale.errors import UserError
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.flat import flat_shapes
from bytescale.runtime.fsdp import (
    clip_gradients,
    full_gradients,
    gradient_norm,
    shard_model,
    shard_placement,
    whole_tensor,
)
from bytescale.runtime.model.decoder import LossModel
from bytescale.train.optimizer import make_optimizer
from bytescale.train.step import run_step
from tests.plans import drawn, placed
from tests.ranks import RankPool, Ranks
from tests.runtime.models import UNEVEN, reference_step, small_decoder, step_data, world_of

LLAMA = {"num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 32000}
MODELS: dict[str, dict[str, Any]] = {
    "llama-7b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, **LLAMA},
    "llama-8b, GQA, tied": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        **LLAMA,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-33b": {
        "model_type": "llama",
        "hidden_size": 6656,
        "intermediate_size": 17920,
        **LLAMA,
        "num_attention_heads": 52,
    },
    "qwen2-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 152064,
    },
    "qwen2-0.5b, tied": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "gemma-7b": {
        "model_type": "gemma",
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_attention_heads": 16,
        "head_dim": 256,
        "num_hidden_layers": 2,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
    "phi-2": {
        "model_type": "phi",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "vocab_size": 51200,
    },
    "5 experts of odd sizes": {
        "model_type": "mixtral",
        "hidden_size": 1000,
        "intermediate_size": 1500,
        "num_local_experts": 5,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "num_hidden_layers": 2,
        "vocab_size": 50257,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        **LLAMA,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_key_value_heads": 4,
        "head_dim": 128,
        **LLAMA,
        "vocab_size": 151936,
    },
}


@pytest.fixture(params=[7, 8, 64, 1000, 1024])
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_states_are_stored_evenly(name: str, fake_world: int) -> None:
    """Rank 0 holds the largest shard, padding included; nothing is allocated here."""
    table = dict(MODELS[name])
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(AutoConfig.for_model(table.pop("model_type"), **table))
    model = LossModel(decoder)
    whole = sum(p.numel() for p in model.parameters())
    assert dist.group.WORLD is not None
    world: Any = SimpleNamespace(group=dist.group.WORLD, device=torch.device("cpu"), shards=None, tp=None)
    shard_model(model, world, torch.bfloat16)
    stored = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    assert whole / fake_world <= stored <= 1.02 * whole / fake_world


def test_a_parameter_is_cut_where_its_group_divides_it() -> None:
    cases = {((8, 256, 64), 8): 0, ((8, 256, 64), 64): 1, ((8, 96, 64), 64): 2, ((7, 5), 4): 0, ((4096,), 64): 0}
    assert {case: shard_placement(*case).dim for case in cases} == cases


def _step(ranks: Ranks, shard_size: int, architecture: str, extra: dict[str, Any]) -> Any:
    """Gradients, norm, and the state after a clipped AdamW step."""
    world = world_of(ranks, shard_size=shard_size)
    plan = placed([61, 40, 9, 30], [[(0, 0), (1, 0), (2, 0)], [(3, 0), (1, 1)], [(2, 1)], [(3, 1)]], ranks.size)
    model = LossModel(small_decoder(architecture, **extra))
    shard_model(model, world, torch.float32)
    shapes = flat_shapes(model.decoder)
    assert bool(shapes) == (shard_size > 1 and extra.get("intermediate_size") == 97)
    run_step(model, CpuKernel(), world, step_data(plan, world.hdp_rank))
    gradients = {name: g.clone() for name, g in full_gradients(model).items()}
    norm = gradient_norm(model, world)
    optimizer = make_optimizer(model, TrainConfig(lr=1e-2))
    clip_gradients(model, norm, norm / 2)
    clipped = gradient_norm(model, world)
    optimizer.step()
    return (
        gradients,
        norm,
        clipped,
        {name: whole_tensor(p.detach(), shapes.get(name)).clone() for name, p in model.decoder.named_parameters()},
    )


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mixtral", {}),
        ("qwen3", {"tie_word_embeddings": True, **UNEVEN}),
    ],
)
def test_any_shards_give_the_same_step(ranks: RankPool, architecture: str, extra: dict[str, Any]) -> None:
    plan = drawn("61 40 9 30", "0[0/3]", "0[1/3] | 1[1/2]", "0[2/3] | 2", "1[0/2] | 3")
    _, expected = reference_step(plan, architecture=architecture, master=torch.float32, **extra)
    whole_norm = float(torch.nn.utils.get_total_norm(list(expected.values())))
    states = []
    for shard_size in (1, 2, 4):
        for gradients, norm, clipped, state in ranks.run(4, _step, shard_size, architecture, extra):
            for name, gradient in gradients.items():
                assert (gradient - expected[name]).abs().max() <= 1e-5 * max(1.0, float(expected[name].abs().max()))
            assert norm == pytest.approx(whole_norm, rel=1e-5) and clipped == pytest.approx(norm / 2, rel=1e-5)
            states.append(state)
    for state in states[1:]:
        for name, tensor in state.items():
            # AdamW's first step is the sign of a gradient: where that is rounding, so is the step.
            chosen = expected[f"decoder.{name}"].abs() > 1e-6 if f"decoder.{name}" in expected else slice(None)
            assert (tensor - states[0][name])[chosen].abs().max() <= 1e-4


def test_a_shard_size_that_does_not_divide_is_refused() -> None:
    ParallelConfig(shard_size=2).check_world_size(8)
    ParallelConfig(shard_size=4, pp_size=2).check_world_size(8)
    for shard_size, pp_size, way_out in ((3, 1, "2"), (8, 2, "4"), (16, 1, "8")):
        with pytest.raises(UserError, match=f"shard_size = {shard_size} does not divide hdp_size = .* is {way_out}$"):
            ParallelConfig(shard_size=shard_size, pp_size=pp_size).check_world_size(8)
