"""Model states over all HDP ranks: FSDP2, driven in the three phases that make unequal micro-batch counts safe.

1. `gather`: parameters are made whole on every rank, module by module in one fixed order.
2. compute: each rank runs its own micro-batches; gradients add up locally, unsharded. No collective happens here.
3. `reduce`: gradients are summed over all ranks once. Public FSDP2 calls do it: a zero-weighted one-token
   micro-batch on every rank, with gradient synchronisation on, whose backward reduce-scatters what has piled up.

Equation: G = (1 / num_targets) * sum over ranks and micro-batches of the gradients of their loss sums. The sum is a
SUM, never a mean; the division happens once, in fp32, on the sharded gradients.

Cost: whole parameters and whole gradients live for the length of a step on every rank (as in ZeRO-1); one all-gather
and one reduce-scatter a step whatever the number of micro-batches. The optimizer sees shards: of all ranks, or of
`shard_size` neighbours, which then gather among themselves; their sums are added up over the groups once more (HSDP).

With tensor parallelism each TP rank has all this for its own parts of the weights; what the TP ranks hold whole (norms,
routers) has its gradient summed over them once, after the reduction, in one all-reduce.
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from bytescale.arrays import ceil_div
from bytescale.data.reader import IGNORED_LABEL
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import AttentionKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.flat import flat_shapes, store_flat
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import PeerToPeer
from bytescale.runtime.sharded import is_split, local_tensor, split_dim, whole_tensor
from bytescale.runtime.tensor_parallel.group import TensorGroup
from bytescale.runtime.tensor_parallel.layers import split_model
from bytescale.runtime.world import World

MAX_PADDING = 0.01
"""A parameter is stored as a column if its cut would be padded by a larger share of its elements,"""

MIN_PADDING = 1024
"""and by at least this many in all: fewer are not worth a view."""


def shard_model(model: LossModel, world: World, dtype: torch.dtype) -> None:
    """Split `model` over the TP ranks and shard it over the HDP ranks, in place; a collective.

    One FSDP2 unit a layer, one for the rest.

    Args:
        model: whole model of this stage in its master type; on the meta device it stays there.
        world: where the stage stands. Its device is where the model trains.
        dtype: type of compute; gradients are accumulated and reduced in the master type.
    """
    master = next(model.parameters())
    model.compute_dtype = dtype
    mesh = state_mesh(world)
    if world.tp is not None:
        # Before anything is on the device, which may have no room for what is not this rank's.
        split_model(model, mesh["tp"], world.tp)
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    if not master.is_meta:
        model.to(world.device)
    shard_size = mesh.size(mesh.ndim - 1)
    store_flat(model, lambda shape: is_uneven(shape, shard_size))
    mixed = dtype != master.dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master.dtype) if mixed else MixedPrecisionPolicy()
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=policy,
            shard_placement_fn=lambda parameter: _placement(parameter, shard_size),
        )
    for module in sharded_modules(model):
        # Neither call is recursive. A plain sum; gloo has no scaled one.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def state_mesh(world: World) -> DeviceMesh:
    """The ranks of this stage as (hdp), with copies (replica, shard), and with tensor parallelism (..., tp).

    Made from the groups of `world`, which have its bound; nothing is exchanged.
    """
    axes, shards = {"hdp": world.group}, world.shards
    if shards is not None:
        axes = {"replica": shards.replicas, "shard": shards.copy}
    if world.tp is not None:
        axes["tp"] = world.tp.group
    if len(axes) == 1:
        return DeviceMesh.from_group(world.group, world.device.type)
    # The HDP ranks of this TP rank, and with each the TP ranks beside it.
    hdp_ranks = torch.tensor(dist.get_process_group_ranks(world.group))
    ranks = hdp_ranks[:, None] - world.tp_rank + torch.arange(world.tp_size)
    shape = [group.size() for group in axes.values()]
    return DeviceMesh.from_group(
        list(axes.values()), world.device.type, mesh=ranks.view(shape), mesh_dim_names=tuple(axes)
    )


def shard_placement(shape: Sequence[int], shard_size: int) -> Shard:
    """The dimension along which a parameter is cut: the first that `shard_size` divides, else the first, padded.

    FSDP2 pads the first dimension only, and pads and gathers whole rows: cutting 8 experts over 64 ranks along it would
    store and send 8 times as much.
    """
    return Shard(next((dim for dim, size in enumerate(shape) if size % shard_size == 0), 0))


def is_uneven(shape: Sequence[int], shard_size: int) -> bool:
    """Whether a parameter of several dimensions would be padded too much where it is cut."""
    if len(shape) < 2:
        return False
    size = shape[shard_placement(shape, shard_size).dim]
    padding = (ceil_div(size, shard_size) * shard_size - size) * (prod(shape) // size)
    return padding > MAX_PADDING * prod(shape) and padding >= MIN_PADDING


def _placement(parameter: torch.Tensor, shard_size: int) -> Shard:
    """`shard_placement` of what a TP rank has, along another dimension than the TP ranks' where one divides."""
    local, dim = local_tensor(parameter), split_dim(parameter)
    other = next((d for d, size in enumerate(local.shape) if d != dim and size % shard_size == 0), None)
    return shard_placement(local.shape, shard_size) if other is None else Shard(other)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The FSDP2 units, in the one order that every rank uses."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather(model: LossModel) -> None:
    """Phase 1: make all parameters whole, and keep every backward from communicating until `reduce`."""
    _set_synchronisation(model, False)
    for module in sharded_modules(model):
        module.unshard()


def release(model: LossModel) -> None:
    """Shard the parameters again after `gather`, where there are no gradients to reduce."""
    for module in sharded_modules(model):
        module.reshard()


def reduce(model: LossModel, kernel: AttentionKernel, comm: PeerToPeer, num_targets: int) -> None:
    """Phase 3: sum the gradients over all ranks and divide by the targets of the global batch.

    Args:
        model: sharded model after this rank's micro-batches, of which there may be none.
        kernel: computes attention, of a single local token.
        comm: attention's group, on which nothing travels here.
        num_targets: targets of the global batch, at least 1.

    Afterwards every parameter's `grad` is the shard of the gradient of the global token mean, and parameters are
    sharded again.
    """
    _set_synchronisation(model, True)
    device = next(model.parameters()).device
    zero_T = torch.zeros(1, dtype=torch.long, device=device)
    one_token = AttentionContext(local_work([1]), kernel, comm)
    output = model(model.one_token(device), torch.full_like(zero_T, IGNORED_LABEL), zero_T, one_token)
    (output.sum() * 0).backward()
    if model.tp is not None:
        _sum_over_tp(model, model.tp)
    # A parameter that takes no part in the model's forward has no gradient, on any rank.
    torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], float(num_targets))


def _set_synchronisation(model: Any, active: bool) -> None:
    model.set_requires_gradient_sync(active)
    model.set_reshard_after_backward(active)
    model.set_is_last_backward(active)


def _sum_over_tp(model: LossModel, tp: TensorGroup) -> None:
    """Add up over the TP ranks the gradients of the weights that each of them holds whole.

    Every rank has seen its own rows, or its own heads, through such a weight, so its gradient is a term of a sum; of
    whatever it is the weight. Gradients are sharded alike on the TP ranks of an HDP rank.
    """
    parts = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None and not is_split(p)]
    if not parts:
        return
    summed = tp.sum_(torch.cat([part.flatten() for part in parts]))
    for part, total in zip(parts, summed.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


def gradient_norm(model: LossModel, world: World, without: nn.Parameter | None = None) -> float:
    """Norm of the gradients of all stages, every weight counted once; a collective of the world.

    Args:
        model: this stage, gradients reduced.
        world: the ranks.
        without: a weight of this stage that another one counts.
    """
    counts_copy = world.shards is None or world.shards.replicas.rank() == 0
    own = [
        local_tensor(p.grad)
        for p in model.parameters()
        if p.grad is not None and p is not without and counts_copy and (world.tp_rank == 0 or is_split(p))
    ]
    square = float(torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).square().sum()) if own else 0.0
    return sqrt(float(world.all_gather_numbers([square]).sum()))


def clip_gradients(model: LossModel, norm: float, max_norm: float) -> None:
    """Scale gradients of global norm `norm` to at most `max_norm`; 0 leaves them."""
    if 0 < max_norm < norm:
        torch._foreach_mul_([local_tensor(p.grad) for p in model.parameters() if p.grad is not None], max_norm / norm)


def full_gradients(model: LossModel) -> dict[str, torch.Tensor]:
    """Whole gradient of every parameter, by name; a collective."""
    shapes = flat_shapes(model)
    return {name: whole_tensor(p.grad, shapes.get(name)) for name, p in model.named_parameters() if p.grad is not None}
