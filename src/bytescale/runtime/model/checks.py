"""What a model's configuration and its attention calls may ask for: everything else is refused by name at start.

`check_config` reads the configuration and names the feature, before ranks start; `check_attention_call` looks at the
arguments of a call. What no list of names knows, `bytescale.runtime.model.probe` finds by running the built model.
"""

import re
from typing import Any

import torch

from bytescale.errors import UserError
from bytescale.runtime.model.rotary import POSITION_DEPENDENT, kind_of, reach, sections

_MAX_COMPLAINT = 200
_ADVICE = re.compile(
    r"trust_remote_code|from_pretrained|https?://|pip install|=True|=False|\b(pass|open an issue|you can)\b", re.I
)
_RANDOM_KEY = re.compile(r"drop|jitter|noise")
_OF_ANOTHER_HEAD = re.compile(r"classif|summary")


def complaint(error: BaseException) -> str:
    """What a library's exception says, as one short line: whole sentences, without advice about its own arguments."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError | AttributeError):
        text = f"{type(error).__name__} {text}"
    kept = ""
    for sentence in re.split(r"(?<=[.!?]) ", text):
        if len(kept) + len(sentence) > _MAX_COMPLAINT or _ADVICE.search(sentence):
            break
        kept = f"{kept} {sentence}".strip()
    return kept or f"Transformers raised {type(error).__name__}"


def _refuse(model_type: str, feature: str, way_out: str) -> None:
    raise UserError(f"model {model_type!r} asks for {feature}, which is not supported yet; {way_out}")


def check_config(config: Any, max_context: int) -> None:
    """Refuse what attention or head would have to ignore.

    Args:
        config: a Hugging Face decoder configuration.
        max_context: longest sequence; a sliding window of at least that many tokens counts as absent.

    Raises:
        UserError: names the feature and the nearest fix.
    """
    name = config.model_type
    null = 'set it to null ("null" in TOML) to train without'

    def value(key: str) -> Any:
        return getattr(config, key, None)

    if value("is_encoder_decoder"):
        _refuse(name, "an encoder", "choose a decoder-only model")
    if config.get_text_config() is not config:
        _refuse(name, "parts beside its text decoder", "choose a text-only model")
    if value("quantization_config"):
        _refuse(name, "quantised weights (quantization_config)", "choose a checkpoint in plain types")
    _check_layers(config, max_context)
    if value("attn_logit_softcapping"):
        _refuse(name, "softcapped attention (attn_logit_softcapping)", null)
    _check_randomness(config)
    for section in sections(config):
        if (kind := kind_of(section)) in POSITION_DEPENDENT:
            _refuse(name, f"rotary type {kind!r}", "use default, linear, yarn or llama3")
    if value("final_logit_softcapping"):
        _refuse(name, "softcapped logits (final_logit_softcapping)", null)
    for key in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
        if value(key) not in (None, 1, 1.0):
            _refuse(name, f"scaled logits ({key} = {value(key)})", f"set {key} = 1")
    if value("zero_expert_num"):
        # A step in which one rank's tokens meet no other expert has no gradient there, and ranks would not agree.
        _refuse(name, f"experts without weights (zero_expert_num = {value('zero_expert_num')})", "set it to 0")
    if value("output_router_logits"):
        _refuse(name, "a router loss (output_router_logits)", "set output_router_logits = false to train without")
    limit, stated_by = reach(config)
    if limit is not None and limit < max_context:
        raise UserError(
            f"model {name!r} has {stated_by}, below data.max_context = {max_context}; "
            "lower max_context or raise max_position_embeddings"
        )
    pad = value("pad_token_id")
    if isinstance(pad, int) and not -config.vocab_size <= pad < config.vocab_size:
        raise UserError(
            f"model {name!r} has pad_token_id = {pad}, which is no token of its vocabulary of {config.vocab_size}; "
            "set it to null or leave it out"
        )


def _check_randomness(config: Any) -> None:
    """Refuse what draws random numbers in training: all ranks would draw the same ones, one process others."""
    asked = {
        key: value
        for key, value in config.to_dict().items()
        if _RANDOM_KEY.search(key) and not _OF_ANOTHER_HEAD.search(key) and type(value) in (int, float) and value
    }
    if asked:
        stated = ", ".join(f"{key} = {value}" for key, value in sorted(asked.items()))
        _refuse(config.model_type, f"random numbers in training ({stated})", "set what draws them to 0")


def _check_layers(config: Any, max_context: int) -> None:
    window = getattr(config, "sliding_window", None)
    default = ["sliding_attention"] if window and getattr(config, "use_sliding_window", True) else ["full_attention"]
    kinds = set(getattr(config, "layer_types", None) or default)
    if other := kinds - {"full_attention", "sliding_attention"}:
        _refuse(config.model_type, f"{', '.join(sorted(other))} layers", "choose a model with full attention")
    if "sliding_attention" in kinds and window and window < max_context:
        _refuse(
            config.model_type,
            f"a sliding window of {window} tokens (sliding_window), below data.max_context = {max_context}",
            f"lower max_context to {window} or set sliding_window to at least {max_context}",
        )


def check_attention_call(
    query_BHTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    max_context: int,
) -> None:
    """Refuse arguments of one attention call that change its result, whatever the configuration said."""
    for key, feature in (("softcap", "softcapping"), ("s_aux", "sinks"), ("position_bias", "a position bias")):
        if options.get(key) is not None:
            raise UserError(f"it asks for {feature} in its attention ({key}), which is not supported yet")
    if mask is not None:
        raise UserError("it brings a mask of its own to its attention, which is not supported yet")
    window = options.get("sliding_window")
    if isinstance(window, int) and window < max_context:
        raise UserError(
            f"a layer asks for a window of {window} tokens, below data.max_context = {max_context}, which is not "
            f"supported yet; lower max_context to {window}"
        )
    if options.get("dropout"):
        raise UserError(f"attention dropout {options['dropout']} is not supported yet; set attention_dropout = 0")
    if query_BHTD.shape[-1] != value_BGTD.shape[-1]:
        raise UserError(
            f"attention with query heads of {query_BHTD.shape[-1]} and value heads of {value_BGTD.shape[-1]} elements "
            "is not supported yet"
        )
