"""What a rank holds of a parameter, and the whole of it.

A parameter that the TP ranks share is cut along one dimension by them and then, of what each has, along one by the HDP
ranks; any other by the HDP ranks alone. The last axis of its mesh is then `tp`. Both cuts are those of `torch.chunk`:
equal parts, the last ones shorter or empty.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def is_split(parameter: Any) -> bool:
    """Whether the TP ranks hold parts of `parameter`, rather than each a copy."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def split_dim(parameter: Any) -> int | None:
    """The dimension along which the TP ranks hold parts of `parameter`; None where each holds it whole."""
    return int(parameter.placements[-1].dim) if is_split(parameter) else None


def local_tensor(tensor: Any) -> torch.Tensor:
    """What this rank holds of a sharded tensor. Anything else as it is."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def whole_tensor(tensor: Any, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank; a collective of its stage. Anything else as it is.

    Args:
        tensor: a parameter or its gradient.
        shape: in the model, from `flat_shapes`, where it is stored as a column.
    """
    whole: torch.Tensor = tensor
    if isinstance(tensor, DTensor):
        dim = split_dim(tensor)
        whole = tensor.full_tensor() if dim is None else _whole_of_split(tensor, dim)
    return whole if shape is None else whole.view(shape)


def _whole_of_split(tensor: DTensor, dim: int) -> torch.Tensor:
    """One axis after the other: torch does not put together what both cut along one dimension, unevenly."""
    *outer, inner = tensor.placements[:-1]
    mesh, names, shape = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or (), list(tensor.shape)
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    shape[dim] = len(torch.arange(shape[dim]).chunk(size)[rank])
    # A cut of a part along the same dimension has a placement of its own, whose dimension is what matters.
    placements = [*outer, Shard(inner.dim)]  # type: ignore[attr-defined]
    part = _spread(tensor.to_local(), mesh[names[:-1]], placements, shape).full_tensor()
    return _spread(part, mesh["tp"], [Shard(dim)], tensor.shape).full_tensor()


def _spread(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
