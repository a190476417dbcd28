"""From `[model]` to a Hugging Face configuration: presets, tables, checkpoint directories, and the sizes they state.

Whatever Transformers raises about a configuration is the user's to mend and becomes one line. TOML has no null: in a
`[model.config]` table the string "null" stands for it.

What a new model does not state comes from its class, except what belongs to somebody else's tokenizer or data: special
tokens are the data's (`begin_id`, `end_id`) or none, and the length of the data only ever fills in a limit that takes
no part in the model's function. A checkpoint keeps all that it says.
"""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging

from bytescale.config.schema import ModelConfig
from bytescale.cost.model import ModelShape
from bytescale.errors import UserError, nearest
from bytescale.runtime.model.checks import check_config, complaint
from bytescale.runtime.model.origin import check_checkpoint, preset
from bytescale.runtime.model.rotary import check_original, ignores_the_limit, sections

_UNDECLARED = {"rope_theta", "rope_scaling", "head_dim"}
"""Keys that architectures read without declaring them in every configuration class."""


_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_model_config(
    model: ModelConfig,
    max_context: int,
    end_id: int | None = None,
    vocab_size: int | None = None,
    begin_id: int | None = None,
) -> Any:
    """The Hugging Face configuration that `model` describes, checked for what we support.

    Args:
        model: the `[model]` table.
        max_context: longest sequence that is to come.
        end_id: the token that ends a document in the data; a new model's `eos_token_id` unless it states one.
        vocab_size: of a preset's embedding; None leaves it as it is.
        begin_id: the token that opens one, if any; its `bos_token_id` likewise.

    Raises:
        UserError: unknown preset, architecture or key, unreadable checkpoint, or an unsupported feature.
    """
    quiet_transformers()
    if model.path is not None:
        config = _config_of_checkpoint(Path(model.path))
    else:
        table = model.config if model.config is not None else preset(str(model.preset), vocab_size)
        config = _config_of_table(table, max_context, (begin_id, end_id, None))
    check_config(config, max_context)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"Transformers has no language model of type {config.model_type!r}; choose a decoder-only model"
        )
    return config


def quiet_transformers() -> None:
    """Our own lines say what matters; those of Transformers would come once a rank."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config_of_checkpoint(path: Path) -> Any:
    check_checkpoint(path)
    _check_architecture(path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"model.path = {path}: {complaint(error)}") from None


def _check_architecture(path: Path) -> None:
    """Refuse a checkpoint that needs code which Transformers does not have; a checkpoint's own code is never run."""
    file = path / "config.json"
    try:
        stored = json.loads(file.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{file} is not a valid JSON file") from None
    model_type = stored.get("model_type") if isinstance(stored, dict) else None
    if not isinstance(model_type, str):
        raise UserError(f"{file} names no model_type")
    if model_type in CONFIG_MAPPING:
        return
    if "auto_map" in stored:
        raise UserError(
            f"model.path = {path}: its architecture {model_type!r} is code of its own (auto_map in config.json), which "
            "is not supported and never run; choose an architecture that Transformers has"
        )
    raise UserError(
        f"model.path = {path}: its architecture {model_type!r} is unknown to Transformers {transformers.__version__}"
    )


def _config_of_table(table: dict[str, Any], max_context: int, special_ids: tuple[int | None, ...]) -> Any:
    values = _with_null(table)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError("[model.config] needs model_type, for example model_type = 'llama'")
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"model.config.model_type = {model_type!r} is unknown to Transformers")
    try:
        default = AutoConfig.for_model(model_type)
    except Exception as error:
        raise UserError(f"model {model_type!r} is not supported: {complaint(error)}") from None
    aliases = getattr(default, "attribute_map", {})
    known = set(default.to_dict()) | set(aliases) | _UNDECLARED
    for key in values:
        if key not in known:
            raise UserError(f"model.config.{key} is not a key of {model_type!r}; {nearest(key, known)}")
    check_original(values, default)
    try:
        config = AutoConfig.for_model(model_type, **values)
        limit = "max_position_embeddings"
        if limit in known and not {limit, aliases.get(limit)} & set(values) and ignores_the_limit(config):
            config = AutoConfig.for_model(model_type, **values, **{limit: max_context})
    except Exception as error:
        raise UserError(f"[model.config]: {complaint(error)}") from None
    _check_theta(values, config)
    for key, token_id in zip(_SPECIAL_TOKENS, special_ids, strict=True):
        if key in values:
            continue
        try:
            setattr(config, key, token_id)
        except Exception:  # a class that knows no model without one
            raise UserError(f"[model.config]: {model_type!r} needs {key}; state it") from None
    return config


def _check_theta(values: dict[str, Any], config: Any) -> None:
    """Refuse a `rope_theta` that the class ignores because its own rotary table has one already."""
    stated, tables = values.get("rope_theta"), sections(config)
    if stated is not None and len(tables) == 1 and tables[0].get("rope_theta", stated) != stated:
        raise UserError(
            f"model.config.rope_theta = {stated} has no effect, the rotary table of {config.model_type!r} says "
            f"{tables[0]['rope_theta']}; state it in model.config.rope_parameters"
        )


def _with_null(value: Any) -> Any:
    """A copy of `value` with None for every string "null"."""
    if isinstance(value, dict):
        return {key: _with_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_null(inner) for inner in value]
    return None if value == "null" else value


def shape_of_config(config: Any, dtype_bytes: int) -> ModelShape:
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
