"""Cuts a decoder into pipeline stages.

A stage is the Hugging Face model itself with its `layers` sliced, the embedding removed except on the first and the
final norm and the head removed except on the last. Only hidden states travel; rotary tables are recomputed on each
stage from the position ids.

How many layers a stage has is decided by cost, measured where there is a profile, embedding and head counted:
`bytescale.cost.predict.stage_layers`, which planner and simulator use too. Cost: freeing what is cut away.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from bytescale.errors import UserError


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """The layers of each stage from how many each has."""
    starts = accumulate(counts, initial=0)
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


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
