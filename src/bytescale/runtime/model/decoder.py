"""Hugging Face decoders, trained through our attention.

Our function is registered in Transformers' attention interface under the name `bytescale`, and in its mask interface
returning no mask: what may attend to what follows from the plan, and travels through the model's forward as the keyword
argument `attention_context`, which reaches every layer, recomputation included. No model code of our own: `LossModel`
wraps a decoder so that embedding, layers, head and loss are one module, which FSDP2 shards as one root.

Shapes: T rows of the micro-batch, no padding, no batch dimension outside this file.
"""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from bytescale.config.schema import ModelConfig
from bytescale.data.reader import IGNORED_LABEL
from bytescale.errors import UserError
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.ring import distributed_attention
from bytescale.runtime.model.checks import check_attention_call, complaint
from bytescale.runtime.model.hf_config import quiet_transformers
from bytescale.runtime.model.loss import token_loss_sum
from bytescale.runtime.model.parts import decoder_layers, is_tied
from bytescale.runtime.sharded import local_tensor
from bytescale.runtime.tensor_parallel.group import TensorGroup


class LossModel(nn.Module):
    """A decoder, or one pipeline stage of it, as one module: its forward ends in the summed loss of a micro-batch.

    Attributes:
        is_first: the input is token ids; on later stages it is the hidden states of the stage before.
        is_last: the output is the loss; on earlier stages it is hidden states.
        is_tied: embedding and head are one weight, on whatever stages they are.
        compute_dtype: type of the hidden states; `shard_model` sets it.
        tp: the ranks that share its layers; `split_model` sets it. Hidden states are then the R rows of this rank of
            the T' that the micro-batch has with its padding, and every rank returns the same loss.

    Args:
        decoder: the model; of a stage what `stage_model` left of it.
        is_first, is_last: which ends the decoder has.
        tied: what the whole decoder said of its ends, where this one lacks one.
        names: what parameters and buffers of a stage are called in the whole decoder.
    """

    def __init__(
        self,
        decoder: Any,
        *,
        is_first: bool = True,
        is_last: bool = True,
        tied: bool | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self._names = names
        self.is_first, self.is_last = is_first, is_last
        self.is_tied = is_tied(decoder) if tied is None else tied
        self.compute_dtype = next(decoder.parameters()).dtype
        self.tp: TensorGroup | None = None

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        return decoder_layers(self.decoder)

    def forward(
        self, source: Tensor, labels_T: Tensor, position_ids_T: Tensor, attention_context: AttentionContext
    ) -> Tensor:
        """On the last stage the cross-entropy summed over the micro-batch's targets, a scalar; else hidden_1RE.

        Args:
            source: input_ids_T on the first stage, hidden_RE on later ones; R = T without tensor parallelism.
            labels_T: next tokens; used by the last stage.
            position_ids_T: index of each token in its sequence.
            attention_context: the micro-batch.
        """
        hidden_1RE = self._hidden_states(source, position_ids_T, attention_context)
        if not self.is_last:
            return hidden_1RE
        head = self.decoder.get_output_embeddings().weight
        if self.tp is None:
            return token_loss_sum(hidden_1RE[0], head, labels_T)
        labels_T = pad(labels_T, (0, self._num_padding(len(labels_T))), value=IGNORED_LABEL)
        first_token = self.tp.rank * self.tp.num_rows(self.decoder.config.vocab_size)
        return token_loss_sum(hidden_1RE[0], local_tensor(head), labels_T, tp=self.tp, first_token=first_token)

    def num_rows(self, num_tokens: int) -> int:
        """Rows of the hidden states that this rank has of a micro-batch of `num_tokens`."""
        return num_tokens if self.tp is None else self.tp.num_rows(num_tokens)

    def _num_padding(self, num_tokens: int) -> int:
        """Rows that a micro-batch of `num_tokens` gets at its end, so that the TP ranks have equally many."""
        return 0 if self.tp is None else self.tp.size * self.num_rows(num_tokens) - num_tokens

    def hidden_states(self, source: Tensor, position_ids_T: Tensor, attention_context: AttentionContext) -> Tensor:
        """Hidden states after the last layer here, and after the final norm on the last stage. [T, hidden_size]."""
        return self._hidden_states(source, position_ids_T, attention_context)[0]

    def _hidden_states(self, source: Tensor, position_ids_T: Tensor, attention_context: AttentionContext) -> Tensor:
        if padding := self._num_padding(len(position_ids_T)):
            position_ids_T = pad(position_ids_T, (0, padding))
            source = pad(source, (0, padding)) if self.is_first else source
        name = "input_ids" if self.is_first else "inputs_embeds"
        output = self.decoder.base_model(
            **{name: source[None]},
            position_ids=position_ids_T[None],
            use_cache=False,
            attention_context=attention_context,
        )
        if attention_context.kept is not None:
            attention_context.kept.end_forward()
        hidden_1TE: Tensor = output.last_hidden_state
        return hidden_1TE

    def end_weight(self) -> nn.Parameter:
        """Weight of the embedding on the first stage, of the head on the last: one and the same where they are tied."""
        module = self.decoder.get_input_embeddings() if self.is_first else self.decoder.get_output_embeddings()
        weight: nn.Parameter = module.weight
        return weight

    def copied_weight(self) -> nn.Parameter | None:
        """The weight here that belongs to another stage: a tied head that the embedding is not beside; else None."""
        return self.end_weight() if self.is_tied and self.is_last and not self.is_first else None

    def whole_name(self, name: str) -> str:
        """What the parameter or buffer `name` of `decoder` is called in the whole model."""
        return name if self._names is None else self._names[name]

    def one_token(self, device: torch.device) -> Tensor:
        """An input of a single row, for a forward that only has to touch every parameter."""
        if self.is_first:
            return torch.zeros(1, dtype=torch.long, device=device)
        return torch.zeros(1, self.decoder.config.hidden_size, dtype=next(self.parameters()).dtype, device=device)


def _attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_context: AttentionContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls in every attention layer; returns (out_BTHD, no weights)."""
    if attention_context is None:
        raise UserError("its code does not pass keyword arguments on to its attention, which is not supported yet")
    check_attention_call(query_BHTD, value_BGTD, attention_mask, options, attention_context.max_context)
    num_tokens = attention_context.work.num_tokens
    padding = query_BHTD.shape[2] - num_tokens
    # Rows beyond the tokens are those that tensor parallelism adds at the end: nothing attends to them.
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1)[:num_tokens] for x in (query_BHTD, key_BGTD, value_BGTD))
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    call: Hashable = 0
    if attention_context.kept is not None:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise UserError("its attention layers are not numbered, which sequences in chunks need")
        call = attention_context.kept.call(layer, attention_context.work)
    out_THD = distributed_attention(q_THD, k_TGD, v_TGD, attention_context, scale, call)
    return (pad(out_THD, (0, 0, 0, 0, 0, padding)) if padding else out_THD)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def register_attention() -> None:
    """Make `attn_implementation="bytescale"` known to Transformers; calling it again changes nothing."""
    AttentionInterface.register("bytescale", _attention)
    AttentionMaskInterface.register("bytescale", _no_mask)


def import_architecture(config: Any) -> None:
    """Import the code of a Hugging Face configuration's model, which `build_decoder` would import otherwise."""
    module = type(config).__module__.replace("configuration_", "modeling_")
    # An architecture without code of that name is for `build_decoder` to complain about.
    with suppress(ImportError):
        import_module(module)


def build_decoder(model: ModelConfig, config: Any, seed: int) -> Any:
    """The decoder in fp32 on the CPU: weights of the checkpoint, or random ones that depend on `seed` alone.

    Raises:
        UserError: the architecture cannot use our attention, or its weights do not load.
    """
    quiet_transformers()
    register_attention()
    torch.manual_seed(seed)
    options = {"attn_implementation": "bytescale", "dtype": torch.float32}
    name = f"model {config.model_type!r}"
    try:
        if model.path is None:
            decoder, loading = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options), {}
        else:
            # Tensors of another shape are let through here and refused by name below.
            decoder, loading = AutoModelForCausalLM.from_pretrained(
                model.path,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == ("bytescale",):
            raise UserError(f"{name} does not use the attention interface of Transformers") from None
        raise UserError(f"{name} cannot be built: {complaint(error)}") from None
    _check_loading(f"model.path = {model.path}", loading)
    decoder_layers(decoder)
    if not isinstance(decoder.get_output_embeddings(), nn.Linear):
        raise UserError(f"{name} has no language-model head that is a linear layer")
    if decoder.get_output_embeddings().bias is not None:
        raise UserError(f"{name} has a bias in its head, which is not supported yet")
    for key, parameter in decoder.named_parameters():
        if parameter.numel() == 0:
            raise UserError(f"{name} has a parameter without elements ({key}: {tuple(parameter.shape)})")
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise UserError(f"{name} has weights that are not finite ({key})")
    if not is_tied(decoder):
        # What a saved model's config.json says must be true of its weights.
        decoder.config.tie_word_embeddings = config.tie_word_embeddings = False
    return decoder


def recompute_layers(decoder: Any) -> None:
    """Let the backward compute every layer again instead of keeping its activations."""
    decoder.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def _check_loading(path: str, loading: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights are not exactly those of the model: what is missing would stay random."""
    if mismatched := loading.get("mismatched_keys"):
        key, stored, wanted = sorted(mismatched, key=str)[0][:3]
        raise UserError(
            f"{path}: {len(mismatched)} weights do not have the shape that config.json asks for, first {key}: "
            f"{tuple(stored)} instead of {tuple(wanted)}"
        )
    for kind, problem in (("missing_keys", "lacks"), ("unexpected_keys", "holds, beyond what config.json describes,")):
        if keys := loading.get(kind):
            raise UserError(f"{path} {problem} {_some(keys)}; config.json and weights must belong together")
    if errors := loading.get("error_msgs"):
        raise UserError(f"{path}: {complaint(ValueError(errors[0]))}")


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more weights" if len(names) > 3 else "")
