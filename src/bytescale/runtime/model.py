"""Hugging Face decoders, trained through our attention.

Our function is registered in Transformers' attention interface under the name `bytescale`, and in its mask interface
returning no mask: what may attend to what follows from the pieces, which travel through the model's forward as the
keyword argument `pieces` and reach every layer, recomputation included. No model code of our own: `LossModel` wraps a
decoder so that embedding, layers, head and loss are one module, which FSDP2 shards as one root.

Shapes: T rows of the micro-batch, no padding, no batch dimension outside this file.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from bytescale.config import ModelConfig
from bytescale.cost.model import ModelShape
from bytescale.errors import UserError, nearest
from bytescale.runtime.attention import AttentionContext, distributed_attention
from bytescale.runtime.loss import token_loss_sum
from bytescale.runtime.support import check_attention_call, check_config

Tensor = torch.Tensor

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


class LossModel(nn.Module):
    """A decoder, or one pipeline stage of it, as one module: its forward ends in the summed loss of a micro-batch.

    Attributes:
        is_first: the input is token ids; on later stages it is the hidden states of the stage before.
        is_last: the output is the loss; on earlier stages it is hidden states.
    """

    def __init__(self, decoder: Any, *, is_first: bool = True, is_last: bool = True) -> None:
        super().__init__()
        self.decoder = decoder
        self.is_first, self.is_last = is_first, is_last

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        layers: nn.ModuleList = self.decoder.base_model.layers
        return layers

    def forward(self, source: Tensor, labels_T: Tensor, position_ids_T: Tensor, pieces: AttentionContext) -> Tensor:
        """On the last stage the cross-entropy summed over the micro-batch's targets, a scalar; else hidden_TE.

        Args:
            source: input_ids_T on the first stage, hidden_TE on later ones.
            labels_T: next tokens; used by the last stage.
            position_ids_T: index of each token in its sequence.
            pieces: the micro-batch.
        """
        hidden_TE = self.hidden_states(source, position_ids_T, pieces)
        if not self.is_last:
            return hidden_TE
        return token_loss_sum(hidden_TE, self.decoder.get_output_embeddings().weight, labels_T)

    def hidden_states(self, source: Tensor, position_ids_T: Tensor, pieces: AttentionContext) -> Tensor:
        """Hidden states after the last layer here, and after the final norm on the last stage. [T, hidden_size]."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        output = self.decoder.base_model(
            **{name: source[None]}, position_ids=position_ids_T[None], use_cache=False, pieces=pieces
        )
        hidden_TE: Tensor = output.last_hidden_state[0]
        return hidden_TE

    def one_token(self, device: torch.device) -> Tensor:
        """An input of a single row, for a forward that only has to touch every parameter."""
        if self.is_first:
            return torch.zeros(1, dtype=torch.long, device=device)
        return torch.zeros(1, self.decoder.config.hidden_size, device=device)


def _attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pieces: AttentionContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls in every attention layer; returns (out_BTHD, no weights)."""
    if pieces is None:
        raise ValueError("attention 'bytescale' needs the keyword argument pieces; call the model through LossModel")
    check_attention_call(query_BHTD, value_BGTD, options)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query_BHTD, key_BGTD, value_BGTD))
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    return distributed_attention(q_THD, k_TGD, v_TGD, pieces, scale)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def register_attention() -> None:
    """Make `attn_implementation="bytescale"` known to Transformers; calling it again changes nothing."""
    AttentionInterface.register("bytescale", _attention)
    AttentionMaskInterface.register("bytescale", _no_mask)
    # Our own lines say what matters; theirs would come once a rank.
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_config(model: ModelConfig, max_context: int) -> Any:
    """The Hugging Face configuration that `model` describes, checked for what we support.

    Raises:
        UserError: unknown preset, architecture or key, unreadable checkpoint, or an unsupported feature.
    """
    if model.path is not None:
        config = _config_of_checkpoint(Path(model.path))
    else:
        table = model.config if model.config is not None else _preset(str(model.preset))
        config = _config_of_table({"max_position_embeddings": max_context, **table})
    check_config(config, max_context)
    return config


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
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path = {path}: {str(error).splitlines()[0]}") from None


def _config_of_table(table: dict[str, Any]) -> Any:
    values = dict(table)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise UserError("[model.config] needs model_type, for example model_type = 'llama'")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        raise UserError(f"model.config.model_type = {model_type!r} is unknown to Transformers") from None
    # Keys that architectures read without declaring them in every configuration class.
    undeclared = {"rope_theta", "rope_scaling", "head_dim"}
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {})) | undeclared
    for key in values:
        if key not in known:
            raise UserError(f"model.config.{key} is not a key of {model_type!r}; {nearest(key, known)}")
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError) as error:
        raise UserError(f"[model.config]: {' '.join(str(error).split())}") from None


def build_decoder(model: ModelConfig, config: Any, seed: int) -> Any:
    """The decoder in fp32 on the CPU: weights of the checkpoint, or random ones that depend on `seed` alone.

    Raises:
        UserError: the architecture cannot use our attention, or its weights do not load.
    """
    register_attention()
    torch.manual_seed(seed)
    options = {"attn_implementation": "bytescale", "dtype": torch.float32}
    try:
        if model.path is None:
            decoder = AutoModelForCausalLM.from_config(config, **options)
        else:
            decoder = AutoModelForCausalLM.from_pretrained(
                model.path, config=config, local_files_only=True, use_safetensors=True, **options
            )
    except (ValueError, OSError) as error:
        raise UserError(f"model {config.model_type!r} cannot be built: {str(error).splitlines()[0]}") from None
    if not hasattr(decoder.base_model, "layers") or decoder.get_output_embeddings() is None:
        raise UserError(f"model {config.model_type!r} is not a decoder with layers and a language-model head")
    if decoder.get_output_embeddings().bias is not None:
        raise UserError(f"model {config.model_type!r} has a bias in its head, which is not supported yet")
    return decoder


def model_shape(config: Any, dtype_bytes: int) -> ModelShape:
    """The sizes that the cost model needs, from a Hugging Face configuration and the bytes of an activation."""
    heads = config.num_attention_heads
    return ModelShape(
        name=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_experts=getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0,
        num_active_experts=getattr(config, "num_experts_per_tok", None) or 0,
        dtype_bytes=dtype_bytes,
    )
