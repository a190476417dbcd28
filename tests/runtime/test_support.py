"""What a model may not ask for is refused by name; a checkpoint must hold exactly the weights of its config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bytescale.config.schema import ModelConfig
from bytescale.errors import UserError
from bytescale.runtime.model.decoder import build_decoder
from bytescale.runtime.model.hf_config import load_model_config, shape_of_config
from bytescale.runtime.model.probe import probe
from tests.runtime.models import ARCHITECTURES, SIZES

CONTEXT = 600
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def start(model: ModelConfig) -> None:
    config = load_model_config(model, CONTEXT)
    shape_of_config(config, 4)
    probe(build_decoder(model, config, 0), CONTEXT)


def refusal(model: ModelConfig) -> str:
    """The one line that refuses `model`, at whatever point of the start."""
    with pytest.raises(UserError) as caught:
        start(model)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def table(model_type: str, **extra: Any) -> ModelConfig:
    return ModelConfig(config={"model_type": model_type, **SIZES, **extra})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            table("mistral", sliding_window=128),
            "a sliding window of 128 tokens (sliding_window), below",
        ),
        (table("qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=0), "a sliding window of 128"),
        (table("gemma3_text", head_dim=8, sliding_window=512), "lower max_context to 512 or set sliding_window"),
        (
            table("gemma2", head_dim=8),
            "softcapped attention (attn_logit_softcapping), which is not",
        ),
        (
            table("gemma2", head_dim=8, attn_logit_softcapping="null", sliding_window=4096),
            'softcapped logits (final_logit_softcapping), which is not supported yet; set it to null ("null" in TOML)',
        ),
        (table("gpt_oss", head_dim=8, sliding_window=4096, **MOE), "'gpt_oss': it asks for sinks in its attention"),
        (table("cohere"), "scaled logits (logit_scale = 0.0625)"),
        (table("granite", logits_scaling=2.0), "scaled logits (logits_scaling = 2.0)"),
        (table("phi"), "a bias in its head"),
        (table("mixtral", output_router_logits=True, **MOE), "a router loss (output_router_logits)"),
        (table("llama", attention_dropout=0.1), "random numbers in training (attention_dropout = 0.1)"),
        (table("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rotary type 'dynamic'"),
        (table("llama", rope_scaling={"rope_type": "linear"}), "factor"),
        (table("llama", rope_scaling={"rope_type": "none such"}), "none such"),
        (table("llama", max_position_embeddings=100), "max_position_embeddings = 100, below data.max_context = 600"),
        (table("llama", hiden_size=3), "model.config.hiden_size is not a key of 'llama'; did you mean 'hidden_size'?"),
        (table("llama", hidden_size="x"), "hidden_size"),
        (table("llama", hidden_size=0), "hidden_size = 0; it must be an integer of at least 1"),
        (table("llama", num_attention_heads=5), "not a multiple of the number of attention heads"),
        (table("llama", num_key_value_heads=3), "does not run as configured"),
        (table("llama", intermediate_size=0), "intermediate_size = 0"),
        (table("llama", hidden_act="none such"), "none such"),
        (table("mixtral", num_local_experts=2, num_experts_per_tok=4), "does not run as configured"),
        (table("none such"), "model_type = 'none such' is unknown to Transformers"),
        (ModelConfig(config={"hidden_size": 32}), "[model.config] needs model_type"),
        (ModelConfig(config={"model_type": ["llama"]}), "[model.config] needs model_type"),
        (ModelConfig(config={"model_type": "t5", "vocab_size": 97}), "an encoder"),
        (ModelConfig(config={"model_type": "gemma3"}), "parts beside its text decoder"),
        (table("mamba2"), "is not a key of 'mamba2'"),
        (ModelConfig(config={"model_type": "jamba", **SIZES}), "linear_attention layers"),
        (table("stablelm"), "does not pass keyword arguments on to its attention"),
        (
            # Its own causal attention, without the interface: packed sequences would see each other.
            ModelConfig(
                config={"model_type": "gpt_neox_japanese", "attention_dropout": 0.0, "hidden_dropout": 0.0}
                | {k: SIZES[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
            ),
            "its layers give another result than with eager attention on each sequence alone",
        ),
        (table("doge", head_dim=8), "it brings a mask of its own to its attention"),
        (table("dory", head_dim=8), "'dory' runs its layer 0 2 times in one forward"),
        (ModelConfig(preset="llama-tinny"), "did you mean 'llama-tiny'?"),
        (ModelConfig(path="nowhere"), "model.path = nowhere holds no config.json"),
    ],
)
def test_what_is_refused(model: ModelConfig, words: str) -> None:
    assert words in refusal(model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_trained_passes(architecture: str) -> None:
    model = table(architecture, **ARCHITECTURES[architecture])
    config = load_model_config(model, CONTEXT)
    assert shape_of_config(config, 4).num_layers == 2
    probe(build_decoder(model, config, 0), CONTEXT)


def test_a_window_that_only_the_attention_call_shows_is_refused() -> None:
    model = table("mistral", sliding_window=None)
    decoder = build_decoder(model, load_model_config(model, CONTEXT), 0)
    decoder.config.sliding_window = 100
    with pytest.raises(UserError, match=r"a window of 100 tokens, below data\.max_context = 600"):
        probe(decoder, CONTEXT)
    probe(decoder, 100)


def test_null_is_a_word_in_a_table() -> None:
    model = table("llama", bos_token_id="null", rope_scaling="null")
    assert load_model_config(model, CONTEXT).bos_token_id is None


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = table("llama", max_position_embeddings=CONTEXT)
    build_decoder(model, load_model_config(model, CONTEXT), 0).save_pretrained(tmp_path)
    return tmp_path


def edit_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(checkpoint: Path, rename: dict[str, str | None], scale: float = 1.0) -> None:
    """Rename weights (None removes) and multiply all."""
    weights = {k: v * scale for k, v in load_file(checkpoint / "model.safetensors").items()}
    for old, new in rename.items():
        value = weights.pop(old)
        if new is not None:
            weights[new] = value
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})


def test_a_sound_checkpoint_keeps_its_weights(checkpoint: Path) -> None:
    model = ModelConfig(path=str(checkpoint))
    decoder = build_decoder(model, load_model_config(model, CONTEXT), 1)
    stored = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(value, decoder.state_dict()[name]) for name, value in stored.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "weights do not have the shape that config.json asks for, first"),
        ({"vocab_size": 300}, "first lm_head.weight: (97, 32) instead of (300, 32)"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "holds, beyond what config.json describes, model.layers.1.input_layernorm.weight"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"model_type": "none such"}, "none such"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantised weights"),
    ],
)
def test_config_and_weights_must_belong_together(checkpoint: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(checkpoint, **changes)
    assert words in refusal(ModelConfig(path=str(checkpoint)))


def test_weights_that_are_missing_or_not_finite(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(checkpoint, {name: "other.weight"})
    assert f"lacks {name}; config.json and weights must belong together" in refusal(ModelConfig(path=str(checkpoint)))
    edit_weights(checkpoint, {"other.weight": name}, scale=float("nan"))
    assert "weights that are not finite" in refusal(ModelConfig(path=str(checkpoint)))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors", None, "holds no *.safetensors weights"),
        ("model.safetensors", b"", "cannot be built"),
        ("model.safetensors", b"\x10", "cannot be built"),
        ("config.json", None, "holds no config.json"),
        ("config.json", b'{"a', "not a valid JSON file"),
        ("config.json", b"{}", "model_type"),
        ("config.json", b"[]", "model_type"),
    ],
)
def test_broken_files(checkpoint: Path, file: str, content: bytes | None, words: str) -> None:
    path = checkpoint / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert words in refusal(ModelConfig(path=str(checkpoint)))


def test_a_file_cut_short(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be built" in refusal(ModelConfig(path=str(checkpoint)))
