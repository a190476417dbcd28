"""Which weights of a decoder layer are split over the TP ranks, and where a block begins and ends.

Read from the tensor-parallel plan that Transformers has for an architecture (`base_model_tp_plan`): paths below a layer
with a style. Of the styles we take those whose result is one term of a sum:

    colwise           rows of a linear layer's weight, and its bias: own heads, own hidden units
    rowwise           columns of the weight; the output is a term of the sum, the bias is added once
    experts           (`moe_tp_experts` and the styles of its weights) whole experts, an equal share on each rank

Entries that only say how to sum a gradient (`replicated_with_grad_allreduce`) are not needed: every whole weight's is
summed once, at the reduction. A **block** is the module that holds split linear layers (`self_attn`, `mlp`), or the
experts. Anything else in a plan is refused by name. Nothing here needs a model, so it is checked before ranks start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bytescale.errors import UserError

_SPLIT = {"colwise": 0, "rowwise": 1}
"""Dimension of a linear layer's weight that is cut."""
_EXPERTS = "moe_tp_experts"
_IGNORED = "replicated_with_grad_allreduce"
_PREFIX = "layers.*."
_ENDS = ("embed_tokens", "norm")
"""Entries outside the layers; embedding and head are split by vocabulary whatever they say."""


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is split.

    Attributes:
        linears: path of a linear layer below the layer -> dimension of its weight that is cut.
        experts: paths of expert modules.
    """

    linears: Mapping[str, int]
    experts: tuple[str, ...]


def block_of(path: str) -> str:
    """The path of the module that holds the one at `path`."""
    return path.rpartition(".")[0]


def layer_plan(config: Any) -> LayerPlan:
    """The plan of a Hugging Face configuration.

    Raises:
        UserError: Transformers has none for this architecture, or one with a style that is not supported.
    """
    name, alone = f"model {config.model_type!r}", "set parallel.tp_size = 1"
    entries = getattr(config, "base_model_tp_plan", None)
    if not entries:
        raise UserError(f"{name} has no tensor-parallel plan in Transformers; {alone}")
    experts = tuple(path.removeprefix(_PREFIX) for path, style in entries.items() if style == _EXPERTS)
    linears: dict[str, int] = {}
    for path, style in entries.items():
        below = path.removeprefix(_PREFIX)
        if path in _ENDS or style == _IGNORED or below in experts or block_of(below) in experts:
            continue
        if below == path or style not in _SPLIT:
            raise UserError(f"{name} has a tensor-parallel plan that is not supported yet ({path}: {style}); {alone}")
        linears[below] = _SPLIT[style]
    return LayerPlan(linears, experts)


def check_sizes(config: Any, tp_size: int) -> None:
    """Whether `tp_size` ranks can share every layer of a model, by its configuration.

    Raises:
        UserError: it has no plan, or a size does not divide; names it and the nearest tp_size that does.
    """
    if tp_size == 1:
        return
    plan = layer_plan(config)
    sizes = _sizes(config, plan)
    divides = [tp for tp in range(1, tp_size + 1) if all(size % tp == 0 for size in sizes.values())]
    for what, size in sizes.items():
        if size % tp_size:
            raise UserError(
                f"parallel.tp_size = {tp_size} does not divide {what} = {size} of model {config.model_type!r}; "
                f"the next smaller that divides all sizes is {divides[-1]}"
            )
    if -(-config.vocab_size // tp_size) * (tp_size - 1) >= config.vocab_size:
        raise UserError(
            f"parallel.tp_size = {tp_size} leaves a rank without a token of vocab_size = {config.vocab_size}"
        )


def _sizes(config: Any, plan: LayerPlan) -> dict[str, int]:
    """What a rank takes an equal share of, by the names of the configuration."""
    keys = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if plan.experts:
        keys += ["num_local_experts" if hasattr(config, "num_local_experts") else "num_experts"]
        # Whole experts are spread, so their width need not divide; that of layers without experts must.
        if "mlp" not in map(block_of, plan.linears):
            keys.remove("intermediate_size")
    sizes = {key: getattr(config, key, None) for key in keys}
    widths = {key: max(size) if isinstance(size, list) and size else size for key, size in sizes.items()}
    return {key: size for key, size in widths.items() if isinstance(size, int)}
