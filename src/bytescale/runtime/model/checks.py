"""What a model may ask for: everything else is refused by name at start, never ignored.

`check_config` reads the configuration and names the feature; `probe` then runs the built model on two short sequences
in one pack, and compares with Hugging Face's own eager attention and head on each sequence alone. That finds what no
list of names knows: another attention, tokens mixed outside attention (which neither packs nor pieces would survive),
positions that are not those given, parameters that would never learn. Cost of the probe: three forward passes of eight
tokens.
"""

import re
from typing import Any

import torch

from bytescale.errors import UserError
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.cpu_kernel import CpuKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.model.rotary import POSITION_DEPENDENT, kind_of, reach, sections
from bytescale.runtime.p2p import PeerToPeer

PROBE_TOLERANCE = 1e-3
"""Relative difference in fp32 above which eager and our attention do not compute the same."""


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
    """Refuse what draws random numbers in training: ranks would draw the same ones, and others than one process."""
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


def probe(decoder: Any, max_context: int) -> None:
    """Compare the built model with what Hugging Face computes for it, on two sequences of a few tokens.

    Args:
        decoder: the fp32 model on the CPU, registered attention active, before sharding.
        max_context: longest sequence that is to come.

    Raises:
        UserError: the configuration does not work, or attention or head do something that would be ignored.
    """
    name = f"model {decoder.config.model_type!r}"
    lengths = [min(5, max_context), min(3, max_context)]
    input_ids = torch.arange(sum(lengths)) % decoder.config.vocab_size
    was_training = decoder.training
    decoder.eval()
    try:
        # Their code on its own comes first: what fails there is the configuration's fault, not ours.
        hidden, logits = _hugging_face(decoder, name, input_ids, lengths)
        packed = _ours(decoder, name, input_ids, lengths, max_context)
    finally:
        decoder.set_attn_implementation("bytescale")
        decoder.train(was_training)
    head = decoder.get_output_embeddings().weight
    if not _close(packed, hidden):
        raise UserError(
            f"{name} does something that is not supported yet: its layers give another result than with eager "
            "attention on each sequence alone"
        )
    if not _close(torch.nn.functional.linear(hidden, head), logits):
        raise UserError(
            f"{name} does something in its head beyond a linear layer (bias, scaling or softcapping), which is not "
            "supported yet"
        )
    names = {id(parameter): key for key, parameter in decoder.named_parameters()}
    ignored = _leaves(logits) - _leaves(packed) - {id(head)}
    if left_out := sorted(names[leaf] for leaf in ignored if leaf in names):
        raise UserError(f"{name} has a parameter that our attention or head would leave out ({left_out[0]})")


def _hugging_face(decoder: Any, name: str, input_ids_T: torch.Tensor, lengths: list[int]) -> tuple[Any, Any]:
    """(hidden_TE, logits_TV) of the sequences, each alone, through eager attention and their head."""
    decoder.set_attn_implementation("eager")
    try:
        outputs = [
            decoder(input_ids=ids[None], use_cache=False, output_hidden_states=True)
            for ids in input_ids_T.split(lengths)
        ]
    except Exception as error:
        raise UserError(f"{name} does not run as configured: {complaint(error)}") from None
    return torch.cat([o.hidden_states[-1][0] for o in outputs]), torch.cat([o.logits[0] for o in outputs])


def _ours(decoder: Any, name: str, input_ids_T: torch.Tensor, lengths: list[int], max_context: int) -> torch.Tensor:
    """hidden_TE of the sequences in one pack."""
    decoder.set_attn_implementation("bytescale")
    comm = PeerToPeer(None, 1.0, torch.device("cpu"))
    context = AttentionContext(local_work(lengths), CpuKernel(), comm, max_context)
    position_ids_T = torch.cat([torch.arange(length) for length in lengths])
    try:
        output = decoder.base_model(
            input_ids=input_ids_T[None], position_ids=position_ids_T[None], use_cache=False, attention_context=context
        )
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    hidden_TE: torch.Tensor = output.last_hidden_state[0]
    return hidden_TE


def _leaves(result: torch.Tensor) -> set[int]:
    """Identities of the parameters that `result` depends on: a walk of the graph, which costs no gradient."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    scale = right.abs().max().clamp_min(1e-30)
    return bool((left - right).abs().max() <= PROBE_TOLERANCE * scale)
