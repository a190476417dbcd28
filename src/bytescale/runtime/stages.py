"""Cuts a decoder into pipeline stages.

A stage is the Hugging Face model itself with its `layers` sliced, the embedding removed except on the first and the
final norm and the head removed except on the last. Only hidden states travel; rotary tables are recomputed on each
stage from the position ids.

Layers are spread so that the most expensive stage is as cheap as possible: with layer cost 1 and the head's cost in
layers on the last stage, minimise over contiguous cuts max_s (number of layers of s + extra of s). Every stage has at
least one layer. Cost: O(num_layers * pp_size) candidates.
"""

import copy
from typing import Any

from torch import nn

from bytescale.cost import ModelShape
from bytescale.errors import UserError


def head_cost_in_layers(shape: ModelShape) -> float:
    """FLOPs of the head and loss over those of a layer, at a length where attention costs what its matrices do."""
    return shape.head_flops_per_token / (2.0 * shape.linear_flops_per_token)


def split_layers(num_layers: int, pp_size: int, head_cost: float = 0.0) -> list[range]:
    """The layers of each stage.

    Args:
        num_layers: of the whole model.
        pp_size: stages.
        head_cost: cost of the head on the last stage, in layers.

    Raises:
        UserError: more stages than layers.
    """
    if pp_size > num_layers:
        raise UserError(f"parallel.pp_size = {pp_size} needs as many layers, the model has {num_layers}")
    last = _layers_of_last_stage(num_layers, pp_size, head_cost)
    base, more = divmod(num_layers - last, pp_size - 1) if pp_size > 1 else (0, 0)
    counts = [base + (stage < more) for stage in range(pp_size - 1)] + [last]
    starts = [sum(counts[:stage]) for stage in range(pp_size)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _layers_of_last_stage(num_layers: int, pp_size: int, head_cost: float) -> int:
    """The most layers the last stage can take without becoming worse than the best cut."""
    if pp_size == 1:
        return num_layers
    candidates = range(1, num_layers - pp_size + 2)
    cost = {n: max(n + head_cost, -(-(num_layers - n) // (pp_size - 1))) for n in candidates}
    return max(candidates, key=lambda n: (-cost[n], n))


def cut_to_stage(decoder: Any, layers: range, *, is_first: bool, is_last: bool) -> None:
    """Keep `layers` of `decoder` and what belongs to its ends, in place; the rest is freed.

    Raises:
        UserError: the decoder does not consist of `embed_tokens`, `layers`, `norm` and `lm_head`.
    """
    if is_first and is_last:
        return
    base = decoder.base_model
    for owner, name in ((base, "embed_tokens"), (base, "layers"), (base, "norm"), (decoder, "lm_head")):
        if not isinstance(getattr(owner, name, None), nn.Module):
            raise UserError(
                f"model {decoder.config.model_type!r} cannot be cut into pipeline stages: it has no {name!r}; "
                "set parallel.pp_size = 1"
            )
    config = copy.deepcopy(base.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    base.config = config
    base.layers = nn.ModuleList(base.layers[i] for i in layers)
    if not is_first:
        base.embed_tokens = None
    if not is_last:
        base.norm = nn.Identity()
        decoder.lm_head = None
