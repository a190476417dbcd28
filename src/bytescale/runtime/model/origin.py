"""Where a model comes from, without torch: built-in presets, and what a checkpoint directory must hold."""

from pathlib import Path
from typing import Any

from bytescale.config.schema import ModelConfig
from bytescale.errors import UserError, nearest

_LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "tie_word_embeddings": True, "bos_token_id": None}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        **_LLAMA,
        "vocab_size": 272,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "llama-125m": {
        **_LLAMA,
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "llama-1b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Built-in configurations by name: the tiny one for trials on a CPU, two common sizes for GPUs."""


def preset(name: str, vocab_size: int | None = None) -> dict[str, Any]:
    """The built-in configuration of that name, with another vocabulary if asked.

    Raises:
        UserError: there is none.
    """
    if name not in PRESETS:
        raise UserError(f"model.preset = {name!r} is unknown; {nearest(name, PRESETS)}")
    return PRESETS[name] if vocab_size is None else PRESETS[name] | {"vocab_size": vocab_size}


def check_checkpoint(path: Path) -> None:
    """Whether `path` holds a configuration and weights.

    Raises:
        UserError: one of them is missing.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"model.path = {path} holds no config.json; give the directory of a Hugging Face checkpoint")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"model.path = {path} holds no *.safetensors weights; other formats are not read")


def check_origin(model: ModelConfig) -> None:
    """Whether the preset or the checkpoint of `model` exists; what it says is for Transformers to judge.

    Raises:
        UserError: it does not.
    """
    if model.preset is not None:
        preset(model.preset)
    if model.path is not None:
        check_checkpoint(Path(model.path))
