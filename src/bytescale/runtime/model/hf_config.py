"""From `[model]` to a Hugging Face configuration: presets, tables, checkpoint directories, and the sizes they state.

Whatever Transformers raises about a configuration is the user's to mend and becomes one line. TOML has no null: in a
`[model.config]` table the string "null" stands for it.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import logging

from bytescale.config.schema import ModelConfig
from bytescale.cost.model import ModelShape
from bytescale.errors import UserError, nearest
from bytescale.runtime.model.checks import check_config, complaint

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

_UNDECLARED = {"rope_theta", "rope_scaling", "head_dim"}
"""Keys that architectures read without declaring them in every configuration class."""


def load_config(model: ModelConfig, max_context: int) -> Any:
    """The Hugging Face configuration that `model` describes, checked for what we support.

    Raises:
        UserError: unknown preset, architecture or key, unreadable checkpoint, or an unsupported feature.
    """
    quiet_transformers()
    if model.path is not None:
        config = _config_of_checkpoint(Path(model.path))
    else:
        table = model.config if model.config is not None else _preset(str(model.preset))
        config = _config_of_table(table, max_context)
    check_config(config, max_context)
    return config


def quiet_transformers() -> None:
    """Our own lines say what matters; those of Transformers would come once a rank."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise UserError(f"model.preset = {name!r} is unknown; {nearest(name, PRESETS)}")
    return PRESETS[name]


def _config_of_checkpoint(path: Path) -> Any:
    if not (path / "config.json").is_file():
        raise UserError(f"model.path = {path} holds no config.json; give the directory of a Hugging Face checkpoint")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"model.path = {path} holds no *.safetensors weights; other formats are not read")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise UserError(f"model.path = {path}: {complaint(error)}") from None


def _config_of_table(table: dict[str, Any], max_context: int) -> Any:
    values = _with_null(table)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError("[model.config] needs model_type, for example model_type = 'llama'")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        raise UserError(f"model.config.model_type = {model_type!r} is unknown to Transformers") from None
    aliases = getattr(default, "attribute_map", {})
    known = set(default.to_dict()) | set(aliases) | _UNDECLARED
    for key in values:
        if key not in known:
            raise UserError(f"model.config.{key} is not a key of {model_type!r}; {nearest(key, known)}")
    limit = "max_position_embeddings"
    if limit in known and not {limit, aliases.get(limit)} & set(values):
        values[limit] = max_context
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise UserError(f"[model.config]: {complaint(error)}") from None


def _with_null(value: Any) -> Any:
    """A copy of `value` with None for every string "null"."""
    if isinstance(value, dict):
        return {key: _with_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_null(inner) for inner in value]
    return None if value == "null" else value


def model_shape(config: Any, dtype_bytes: int) -> ModelShape:
    """The sizes that the cost model needs, from a Hugging Face configuration and the bytes of an activation.

    Raises:
        UserError: a size is missing or below 1.
    """
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    return ModelShape(
        name=config.model_type,
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", max(1, hidden // heads)),
        ffn_size=_size(config, "intermediate_size", 4 * hidden),
        vocab_size=_size(config, "vocab_size"),
        num_experts=getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0,
        num_active_experts=getattr(config, "num_experts_per_tok", None) or 0,
        dtype_bytes=dtype_bytes,
    )


def _size(config: Any, key: str, default: int | None = None) -> int:
    value = getattr(config, key, None)
    if value is None:
        value = default
    if isinstance(value, list) and value:
        value = max(value)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"model {config.model_type!r} has {key} = {value}; it must be an integer of at least 1")
    return value
