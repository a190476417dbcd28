"""Cuts a decoder into pipeline stages.

A stage is the Hugging Face model itself with its `layers` sliced, the embedding removed except on the first and the
final norm and the head removed except on the last. Only hidden states travel; rotary tables are recomputed on each
stage from the position ids. What a base model multiplies its embeddings by, it would multiply every stage's input by;
that factor is 1 on later stages. Whether stages then compute what the whole model does is not assumed: `probe` runs
them one after the other.

How many layers a stage has is decided by cost, measured where there is a profile, embedding and head counted:
`bytescale.cost.predict.stage_layers`, which planner and simulator use too. Cost: a stage shares its parameters with the
decoder that it was cut from, so what no stage holds is freed with that decoder.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from bytescale.errors import UserError
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.parts import is_tied

_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")
_ENTRY_FACTORS = ("embedding_multiplier",)


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """The layers of each stage from how many each has."""
    starts = accumulate(counts, initial=0)
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


def stage_model(decoder: Any, stages: Sequence[range], stage: int) -> LossModel:
    """One stage of `decoder`, which stays as it is.

    Args:
        decoder: the whole model.
        stages: layers of each stage; a single one is the whole model.
        stage: which one.

    Raises:
        UserError: the decoder does not consist of an embedding, `layers`, a norm and a head.
    """
    if len(stages) == 1:
        return LossModel(decoder)
    is_first, is_last = stage == 0, stage == len(stages) - 1
    base = decoder.base_model
    embedding = _name_of(base, decoder.get_input_embeddings())
    head = _name_of(decoder, decoder.get_output_embeddings())
    norm = next((name for name in _NORMS if isinstance(getattr(base, name, None), nn.Module)), None)
    layers = getattr(base, "layers", None)
    if embedding is None or norm is None or head is None or not isinstance(layers, nn.ModuleList):
        raise UserError(
            f"model {decoder.config.model_type!r} cannot be cut into pipeline stages: it is not an embedding, "
            "`layers`, a norm and a head; set parallel.pp_size = 1"
        )
    if stages[-1].stop != len(layers):
        raise UserError(
            f"model {decoder.config.model_type!r} cannot be cut into pipeline stages: its configuration counts "
            f"{stages[-1].stop} layers, it has {len(layers)}; set parallel.pp_size = 1"
        )
    part, part_base = _copy(decoder), _copy(base)
    setattr(part, decoder.base_model_prefix, part_base)
    part_base.config = _config_of(base.config, stages[stage])
    part_base.layers = nn.ModuleList(layers[i] for i in stages[stage])
    if not is_first:
        setattr(part_base, embedding, None)
        for factor in _ENTRY_FACTORS:
            if hasattr(part_base, factor):
                setattr(part_base, factor, 1.0)
    if not is_last:
        setattr(part_base, norm, nn.Identity())
        setattr(part, head, None)
    return LossModel(part, is_first=is_first, is_last=is_last, tied=is_tied(decoder), names=_whole_names(part, decoder))


def _whole_names(part: Any, decoder: Any) -> dict[str, str]:
    """Names in `part` -> names in `decoder`; a weight that two modules of `decoder` share has the first one's."""
    names: dict[int, str] = {}
    for name, tensor in decoder.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    return {name: names[id(tensor)] for name, tensor in part.state_dict(keep_vars=True).items()}


def _config_of(config: Any, layers: range) -> Any:
    own = copy.deepcopy(config)
    own.num_hidden_layers = len(layers)
    if getattr(own, "layer_types", None):
        own.layer_types = [own.layer_types[i] for i in layers]
    return own


def _copy(module: Any) -> Any:
    """The same module with a list of parts of its own, which are the same parts."""
    other = copy.copy(module)
    other.__dict__["_modules"] = dict(module._modules)
    return other


def _name_of(owner: Any, part: Any) -> str | None:
    return next((name for name, module in owner.named_children() if module is part), None)
