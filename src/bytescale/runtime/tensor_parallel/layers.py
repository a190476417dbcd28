"""Splits a built decoder over the TP ranks of an HDP rank, in place: weights, blocks, embedding and head.

Split weights become DTensors on the `tp` axis of the stage's mesh, so that whatever gathers, saves or counts them needs
to know nothing. Compute sees plain tensors: a split module runs its own forward on its local weights. A block
(`self_attn`, `mlp`) gathers the rows of all ranks at its input and sums own rows at its output
(`bytescale.runtime.tensor_parallel.group`); between blocks a rank has its own rows only. Experts are spread whole:
router and shared experts run on own rows or in blocks of their own, the experts on all rows with the routes of others
at weight zero. The embedding looks up the ids of its share of the vocabulary and sums; the head is
`bytescale.runtime.model.loss`.

Invariant: names and whole values of all parameters stay what they were, and tied weights stay one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bytescale.errors import UserError
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.sharded import local_tensor
from bytescale.runtime.tensor_parallel.group import BlockInput, TensorGroup, gathered, gathered_linear, summed
from bytescale.runtime.tensor_parallel.plan import block_of, layer_plan

_ROUTED = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of an expert module's forward."""


def split_model(model: LossModel, mesh: DeviceMesh | None, tp: TensorGroup) -> None:
    """Keep this rank's share of `model`, whose whole weights are equal on all TP ranks; no communication.

    Args:
        model: a stage, before FSDP2; its split weights go to the device of `mesh`.
        mesh: the `tp` axis of the stage's mesh; None makes plain tensors that are views of the whole.
        tp: the group of the same ranks.

    Raises:
        UserError: a layer is not built as its tensor-parallel plan says.
    """
    decoder = model.decoder
    plan = layer_plan(decoder.config)
    for layer in model.layers:
        modules = dict(layer.named_modules())
        # A layer may lack what another one has: dense layers between those with experts.
        linears = [path for path in plan.linears if path in modules]
        for path in linears:
            _split_linear(modules[path], plan.linears[path], mesh, tp)
        for block in dict.fromkeys(map(block_of, linears)):
            at_input = [modules[path] for path in linears if block_of(path) == block and plan.linears[path] == 0]
            _wrap(modules[block], _run_block, tp, at_input)
        for path in plan.experts:
            if path in modules:
                _split_experts(modules[path], mesh, tp)
    if model.is_first:
        _split_embedding(decoder.get_input_embeddings(), mesh, tp)
    if model.is_last:
        head = decoder.get_output_embeddings()
        if model.is_first and model.is_tied:
            head.weight = decoder.get_input_embeddings().weight
        else:
            _cut(head, "weight", 0, mesh, tp)
    model.tp = tp


def _cut(module: nn.Module, name: str, dim: int, mesh: DeviceMesh | None, tp: TensorGroup) -> None:
    """Replace a whole parameter by this rank's part of it along `dim`."""
    whole = module.get_parameter(name)
    local = whole.detach().chunk(tp.size, dim)[tp.rank]
    if mesh is None:
        module.register_parameter(name, nn.Parameter(local, requires_grad=whole.requires_grad))
        return
    # Its own memory: a view would keep the whole.
    local = local.clone(memory_format=torch.contiguous_format)
    spread = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
    module.register_parameter(name, nn.Parameter(spread, requires_grad=whole.requires_grad))


def _wrap(module: nn.Module, run: Callable[..., Any], *arguments: Any) -> None:
    """Let `run(module, its own forward, *arguments, ...)` stand for the forward of `module`."""
    module.forward = functools.partial(run, module, module.forward, *arguments)


def _run_local(module: nn.Module, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The forward of `module` with the local parts of its split weights in their place."""
    local = {name: p.to_local() for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    return _with(module, local, forward, *arguments, **keywords)


def _with(
    module: nn.Module, values: dict[str, Any], forward: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    # An attribute of the instance goes before the parameter of that name, which stays where it is.
    vars(module).update(values)
    try:
        return forward(*arguments, **keywords)
    finally:
        for name in values:
            del vars(module)[name]


def _split_linear(linear: nn.Module, dim: int, mesh: DeviceMesh | None, tp: TensorGroup) -> None:
    if not isinstance(linear, nn.Linear):
        raise UserError(f"{type(linear).__name__} cannot be split over TP ranks yet; set parallel.tp_size = 1")
    _cut(linear, "weight", dim, mesh, tp)
    if dim == 0 and linear.bias is not None:
        _cut(linear, "bias", 0, mesh, tp)
    if dim == 1 and linear.bias is not None:
        _wrap(linear, _run_with_bias_once, tp)
    elif dim == 0 and type(linear) is nn.Linear:
        _wrap(linear, _run_at_input)
    _wrap(linear, _run_local)


def _run_with_bias_once(linear: nn.Linear, forward: Callable[..., Tensor], tp: TensorGroup, x_TX: Tensor) -> Tensor:
    """A term of a sum over the ranks to which the bias belongs once; its gradient is zero on the other ranks."""
    y_TX: Tensor = _with(linear, {"bias": linear.bias * float(tp.rank == 0)}, forward, x_TX)
    return y_TX


def _run_at_input(linear: nn.Linear, forward: Callable[..., Tensor], x_1TE: Tensor) -> Tensor:
    """A layer that, where it is given the very input of its block, does not keep it."""
    block: BlockInput | None = vars(linear).get(_BLOCK)
    if block is None or x_1TE is not block.whole_TE:
        return forward(x_1TE)
    return gathered_linear(x_1TE, linear.weight, linear.bias, block)


_BLOCK = "_block_input"
"""Attribute of a linear layer while its block runs."""


def _run_block(
    module: nn.Module,
    forward: Callable[..., Any],
    tp: TensorGroup,
    at_input: Sequence[nn.Module],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """A block from own rows [1, R, E] to own rows; what else it returns or is given passes as it is.

    `at_input` are its layers that may take its input as it comes.
    """
    block = BlockInput(tp)
    own_1RE = arguments[0] if arguments else keywords["hidden_states"]
    block.whole_TE = gathered(own_1RE[0], tp, block)[None]
    if arguments:
        arguments = (block.whole_TE, *arguments[1:])
    else:
        keywords["hidden_states"] = block.whole_TE
    for linear in at_input:
        vars(linear)[_BLOCK] = block
    try:
        output = forward(*arguments, **keywords)
    finally:
        block.whole_TE = None
        for linear in at_input:
            del vars(linear)[_BLOCK]
    if isinstance(output, tuple):
        return (summed(output[0][0], tp, block)[None], *output[1:])
    return summed(output[0], tp, block)[None]


def _split_experts(experts: Any, mesh: DeviceMesh | None, tp: TensorGroup) -> None:
    names = tuple(inspect.signature(experts.forward).parameters)
    if names != _ROUTED or not hasattr(experts, "num_experts"):
        raise UserError(
            f"its experts take {', '.join(names)}, which cannot be spread over TP ranks yet; set parallel.tp_size = 1"
        )
    for name, parameter in list(experts.named_parameters(recurse=False)):
        assert parameter.shape[0] == experts.num_experts, f"{name} does not hold one entry an expert"
        _cut(experts, name, 0, mesh, tp)
    experts.num_experts //= tp.size
    # Routes to no expert of this rank carry the number after the last one, which this lets every back-end pass over.
    experts._is_expert_parallel = True
    _wrap(experts, _run_experts, tp)


def _run_experts(
    experts: Any,
    forward: Callable[..., Tensor],
    tp: TensorGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """This rank's experts on the rows of all ranks; own rows of the sum."""
    index_TK = tp.gather(top_k_index) - tp.rank * experts.num_experts
    is_other_TK = (index_TK < 0) | (index_TK >= experts.num_experts)
    index_TK = index_TK.masked_fill(is_other_TK, experts.num_experts)
    weights_TK = gathered(top_k_weights, tp).masked_fill(is_other_TK, 0)
    rows_TE = gathered(hidden_states, tp)
    output_TE = _run_local(experts, forward, rows_TE, index_TK, weights_TK)
    # A rank none of whose experts has a token has gradients of zero, not none: the others wait for it where the
    # backward sums over the ranks, and at the reduction.
    used = [rows_TE, weights_TK, *map(local_tensor, experts.parameters(recurse=False))]
    untouched = sum(tensor.flatten()[0] for tensor in used)
    return summed(output_TE + 0 * untouched, tp)


def _split_embedding(embedding: Any, mesh: DeviceMesh | None, tp: TensorGroup) -> None:
    size = -(-embedding.weight.shape[0] // tp.size)
    first = tp.rank * size
    _cut(embedding, "weight", 0, mesh, tp)
    num_own = local_tensor(embedding.weight).shape[0]
    if embedding.padding_idx is not None:
        # The row that learns nothing, as this rank counts; else another one would be.
        own = embedding.padding_idx - first
        embedding.padding_idx = own if 0 <= own < num_own else None
    _wrap(embedding, _run_local)
    _wrap(embedding, _run_embedding, tp, first, num_own)


def _run_embedding(
    _: nn.Module, forward: Callable[..., Tensor], tp: TensorGroup, first: int, num_own: int, input_ids_1T: Tensor
) -> Tensor:
    """Own rows [1, R, E] of the embeddings of all ids."""
    own_T = input_ids_1T[0] - first
    is_other_T = (own_T < 0) | (own_T >= num_own)
    hidden_TE = forward(own_T.masked_fill(is_other_T, 0))
    return summed(hidden_TE.masked_fill(is_other_T[:, None], 0), tp)[None]
