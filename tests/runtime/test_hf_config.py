"""What a new model's configuration takes from its class, its data and its table, and what a checkpoint may bring."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale.config.schema import ModelConfig
from bytescale.errors import UserError
from bytescale.runtime.model.decoder import build_decoder
from bytescale.runtime.model.hf_config import load_model_config
from tests.runtime.models import SIZES


def table(model_type: str, **extra: Any) -> ModelConfig:
    return ModelConfig(config={"model_type": model_type, **SIZES, **extra})


def refusal(model: ModelConfig, max_context: int = 512) -> str:
    with pytest.raises(UserError) as caught:
        load_model_config(model, max_context)
    return str(caught.value)


PADDED = {"olmo2": {}, "phi3": {}, "smollm3": {}, "glm": {"head_dim": 8}, "glm4": {"head_dim": 8}, "flex_olmo": {}}


@pytest.mark.parametrize("model_type", [*PADDED, "llama"])
def test_special_tokens_are_the_data_s_and_every_row_learns(model_type: str) -> None:
    model = table(model_type, **PADDED.get(model_type, {}))
    config = load_model_config(model, 512, end_id=7)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 7, None)
    assert build_decoder(model, config, 0).get_input_embeddings().padding_idx is None


def test_special_tokens_that_a_table_states_stay() -> None:
    model = table("olmo2", pad_token_id=3, eos_token_id=[4, 5])
    config = load_model_config(model, 512, end_id=7)
    assert (config.pad_token_id, config.eos_token_id) == (3, [4, 5])
    assert build_decoder(model, config, 0).get_input_embeddings().padding_idx == 3
    assert "pad_token_id = 97, which is no token of its vocabulary of 97" in refusal(table("llama", pad_token_id=97))


def test_a_class_that_knows_no_model_without_a_token_asks_for_it() -> None:
    assert "'cwm' needs bos_token_id; state it" in refusal(table("cwm", sliding_window=4096))


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    return {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **extra, **keys}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_length_of_the_data_is_never_the_original_context(kind: str, key: str) -> None:
    for limit in ({}, {"max_position_embeddings": 8192}):
        message = refusal(table("qwen2", **{key: rope(kind)}, **limit))
        assert f"model.config.{key} asks for rotary type {kind!r} without original_max_position_embeddings" in message
    assert "original_max_position_embeddings" in refusal(table("phi3", **{key: rope(kind)}))


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_original_context_that_is_stated_is_the_one_that_counts(kind: str) -> None:
    model = table("qwen2", rope_parameters=rope(kind, original_max_position_embeddings=512))
    configs = [load_model_config(model, max_context) for max_context in (512, 2048)]
    first, second = (build_decoder(model, config, 0).base_model.rotary_emb.inv_freq for config in configs)
    assert torch.equal(first, second)
    assert configs[1].rope_parameters["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("parameters", "limit", "reach"),
    [
        (rope("yarn", original_max_position_embeddings=512), 512, 2048),
        (rope("yarn", original_max_position_embeddings=512), 2048, 2048),
        (rope("llama3", original_max_position_embeddings=512), 512, 2048),
        (rope("llama3", original_max_position_embeddings=512), 4096, 4096),
        (rope("linear"), 512, 2048),
        ({"rope_type": "default", "rope_theta": 10000.0}, 512, 512),
    ],
)
def test_how_far_a_configuration_reaches(parameters: dict[str, Any], limit: int, reach: int) -> None:
    model = table("qwen2", rope_parameters=parameters, max_position_embeddings=limit)
    assert load_model_config(model, reach).max_position_embeddings == limit
    assert f"below data.max_context = {reach + 1}" in refusal(model, reach + 1)


def test_learned_positions_are_no_matter_of_the_data() -> None:
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    model = ModelConfig(config={"model_type": "biogpt", **sizes, "intermediate_size": 64} | NO_DROPOUT)
    assert load_model_config(model, 100).max_position_embeddings == 1024
    assert "max_position_embeddings = 1024, below data.max_context = 2000" in refusal(model, 2000)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_a_theta_that_would_be_ignored_is_refused() -> None:
    assert "rope_theta = 5.0 has no effect" in refusal(table("apertus", rope_theta=5.0))


@pytest.mark.parametrize("answer", ["y", "n"])
def test_code_of_a_checkpoint_is_never_run_and_nobody_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    mark = tmp_path / "ran"
    maps = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "my_llama", "auto_map": maps}))
    (tmp_path / "configuration_my.py").write_text(f"open({str(mark)!r}, 'w').write('x')\n")
    (tmp_path / "model.safetensors").write_bytes(b"")
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda question="": asked.append(question) or answer)
    message = refusal(ModelConfig(path=str(tmp_path)))
    assert "'my_llama' is code of its own (auto_map in config.json), which is not supported" in message
    assert not asked and not mark.exists()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "my_llama"}))
    assert "'my_llama' is unknown to Transformers" in refusal(ModelConfig(path=str(tmp_path)))
