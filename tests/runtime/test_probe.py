"""What only the built model knows: stages against the whole, random numbers in training, ties, calls per layer."""

from typing import Any

import pytest
import torch
from torch import nn

from bytescale.config.schema import ModelConfig
from bytescale.errors import UserError
from bytescale.runtime.model.decoder import LossModel, build_decoder
from bytescale.runtime.model.hf_config import load_model_config
from bytescale.runtime.model.probe import probe
from bytescale.runtime.model.stages import stage_model
from tests.plans import drawn, drawn_in_chunks
from tests.ranks import RankPool, Ranks
from tests.runtime.models import SIZES, even_stages, reference_of, step_of

SCALED = {
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.0,
    "embedding_multiplier": 12.0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ENTRY: dict[str, dict[str, Any]] = {
    "granite": SCALED,
    "granitemoe": {**SCALED, **EXPERTS},
    "hyperclovax": {"embedding_multiplier": 10.0},
    "diffllama": {},
}


def decoder_of(model_type: str, **extra: Any) -> Any:
    sizes = {**SIZES, "num_hidden_layers": 4, "tie_word_embeddings": False}
    model = ModelConfig(config={"model_type": model_type, **sizes, **extra})
    return build_decoder(model, load_model_config(model, 512), 0)


@pytest.mark.parametrize("model_type", ENTRY)
def test_stages_compute_what_the_whole_does(model_type: str) -> None:
    decoder = decoder_of(model_type, **ENTRY[model_type])
    for pp_size in (2, 3):
        probe(decoder, 512, even_stages(decoder, pp_size))
    assert len(decoder.base_model.layers) == 4 and decoder.lm_head is not None


def test_stages_that_differ_are_refused() -> None:
    decoder = decoder_of("llama")
    base = decoder.base_model
    base.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            kwargs
            | {"inputs_embeds": 2 * kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else None},
        ),
        with_kwargs=True,
    )
    probe(decoder, 512)
    with pytest.raises(UserError, match="2 stages one after the other give another result than the whole model; set"):
        probe(decoder, 512, even_stages(decoder, 2))


class _Rarely(nn.Module):
    """Leaves its input out once in a million times."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 0 if self.training and torch.rand([]) < 1e-6 else hidden


class _Noise(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 1e-4 * torch.randn_like(hidden) if self.training else hidden


@pytest.mark.parametrize("module", [nn.Dropout(1e-6), _Rarely(), _Noise()])
def test_random_numbers_are_found_whatever_their_name_and_however_rare(module: nn.Module) -> None:
    decoder = decoder_of("llama")
    decoder.base_model.layers[2].input_layernorm = nn.Sequential(decoder.base_model.layers[2].input_layernorm, module)
    with pytest.raises(UserError, match="draws random numbers in training"):
        probe(decoder, 512)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("starcoder2", {"residual_dropout": 0.2, "embedding_dropout": 0.1}),
        ("phi3", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.3, "sliding_window": "null", **EXPERTS}),
    ],
)
def test_random_numbers_are_refused_by_the_keys_that_ask_for_them(model_type: str, keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="random numbers in training") as caught:
        decoder_of(model_type, **keys)
    assert all(f"{key} = {value}" in str(caught.value) for key, value in keys.items() if isinstance(value, float))


def _draw_and_drop(*_: Any) -> None:
    torch.rand([])


def test_drawing_what_changes_nothing_is_no_randomness() -> None:
    decoder = decoder_of("llama")
    decoder.base_model.layers[0].register_forward_pre_hook(_draw_and_drop)
    probe(decoder, 512)


def test_the_weights_say_what_is_tied() -> None:
    decoder = decoder_of("llama", tie_word_embeddings=True)
    assert LossModel(decoder).is_tied
    assert all(stage_model(decoder, even_stages(decoder, 2), stage).is_tied for stage in (0, 1))
    decoder.lm_head.weight = nn.Parameter(decoder.lm_head.weight.detach().clone())
    assert not LossModel(decoder).is_tied
    assert not any(stage_model(decoder, even_stages(decoder, 2), stage).is_tied for stage in (0, 1))


def _worst(ranks: Ranks, model_type: str, plan: Any, checkpointing: bool) -> float:
    """Largest error of a gradient against one process, over its largest entry; fp64 but for norms."""
    whole, cut = (decoder_of(model_type, **ENTRY[model_type]).double().train() for _ in range(2))
    _, expected = reference_of(plan, whole)
    _, found, _ = step_of(ranks, plan, cut, torch.float64, checkpointing=checkpointing)
    return max(float((found[k] - expected[k]).abs().max() / expected[k].abs().max().clamp_min(1e-12)) for k in found)


# Experts are not computed in fp64; the sweep of all architectures has them in fp32.
@pytest.mark.parametrize("model_type", [name for name in ENTRY if name != "granitemoe"])
def test_gradients_in_stages_and_chunks_are_those_of_one_process(ranks: RankPool, model_type: str) -> None:
    whole = drawn("60 20", "0 | 1", pp_size=2)
    chunks = drawn_in_chunks("60 20", "0@0:10 | 0@10:30 | 0@30:60 | 1@0:20")
    assert max(ranks.run(2, _worst, model_type, whole, False)) < 1e-5
    for checkpointing in (False, True):
        assert max(ranks.run(2, _worst, model_type, chunks, checkpointing)) < 1e-5
