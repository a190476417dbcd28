"""Where a built decoder keeps what the rest goes by: its layers, and whether embedding and head are one weight.

Both are asked of the object. A configuration's word is not enough: a checkpoint that says tied may hold another head,
and architectures name their layers as they like (`layers`, `h`, `blocks`, `decoder.layers`).
"""

from typing import Any

from torch import nn

from bytescale.errors import UserError


def is_tied(decoder: Any) -> bool:
    """Whether embedding and head are one parameter."""
    embedding, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    return embedding is not None and head is not None and embedding.weight is head.weight


def decoder_layers(decoder: Any) -> nn.ModuleList:
    """The layers, in order: `layers` of the base model, else the one list in it that has as many modules as layers.

    Raises:
        UserError: there is no such list, or more than one.
    """
    base = decoder.base_model
    direct = getattr(base, "layers", None)
    if isinstance(direct, nn.ModuleList):
        return direct
    lists = {name: module for name, module in base.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    outermost = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    number = getattr(decoder.config, "num_hidden_layers", None)
    fitting = [module for module in outermost.values() if len(module) == number]
    if len(fitting) != 1:
        places = [f"{name} ({len(module)})" for name, module in outermost.items()]
        raise UserError(
            f"model {decoder.config.model_type!r} does not keep its layers in one list, which is needed to shard them; "
            f"lists found: {', '.join(places[:3]) or 'none'}{' and more' if len(places) > 3 else ''}"
        )
    return fitting[0]
