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
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from bytescale.arrays import ceil_div
from bytescale.data.micro_batch import IGNORED_LABEL
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import AttentionKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.flat import flat_shapes, store_flat
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import PeerToPeer
from bytescale.runtime.world import ShardGroups

MAX_PADDING = 0.01
"""A parameter is stored as a column if its cut would be padded by a larger share of its elements,"""

MIN_PADDING = 1024
"""and by at least this many in all: fewer are not worth a view."""


def shard_model(
    model: LossModel,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    shards: ShardGroups | None = None,
) -> None:
    """Shard the parameters of `model` over `group`, in place: one FSDP2 unit a layer, one for the rest. A collective.

    Args:
        model: whole model in its master type; on the meta device it stays there.
        group: all HDP ranks; not the group that attention uses.
        device: where it trains.
        dtype: type of compute; gradients are accumulated and reduced in the master type.
        shards: groups of this rank when fewer ranks than all share a copy; None shards over all of `group`.
    """
    master = next(model.parameters())
    if not master.is_meta:
        model.to(device)
    model.compute_dtype = dtype
    shard_size = group.size() if shards is None else shards.copy.size()
    store_flat(model, lambda shape: is_uneven(shape, shard_size))
    mesh = _mesh(group, device, shards)
    mixed = dtype != master.dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master.dtype) if mixed else MixedPrecisionPolicy()
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=policy,
            shard_placement_fn=lambda parameter: shard_placement(parameter.shape, shard_size),
        )
    for module in sharded_modules(model):
        # Neither call is recursive. A plain sum; gloo has no scaled one.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _mesh(group: dist.ProcessGroup, device: torch.device, shards: ShardGroups | None) -> DeviceMesh:
    """`group` as a line of ranks, or as copies x shards."""
    if shards is None:
        return DeviceMesh.from_group(group, device.type)
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shards.copy.size())
    groups = [shards.replicas, shards.copy]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replica", "shard"))


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
    # A parameter that takes no part in the model's forward has no gradient, on any rank.
    torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], float(num_targets))


def _set_synchronisation(model: Any, active: bool) -> None:
    model.set_requires_gradient_sync(active)
    model.set_reshard_after_backward(active)
    model.set_is_last_backward(active)


def gradient_norm(model: LossModel, without: nn.Parameter | None = None) -> float:
    """Norm of the whole gradients of this stage, leaving out `without`; a collective of the stage."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p is not without]
    return float(whole_tensor(torch.nn.utils.get_total_norm(gradients)))


def clip_gradients(model: LossModel, norm: float, max_norm: float) -> None:
    """Scale gradients of global norm `norm` to at most `max_norm`; 0 leaves them."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, torch.tensor(norm))


def full_gradients(model: LossModel) -> dict[str, torch.Tensor]:
    """Whole gradient of every parameter, by name; a collective."""
    shapes = flat_shapes(model)
    return {name: whole_tensor(p.grad, shapes.get(name)) for name, p in model.named_parameters() if p.grad is not None}


def whole_tensor(tensor: Any, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank; a collective. Anything else as it is.

    Args:
        tensor: a parameter or its gradient.
        shape: in the model, from `flat_shapes`, where it is stored as a column.
    """
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole if shape is None else whole.view(shape)
