"""What this rank holds of the model and its optimizer: slices of whole tensors, by the names of the whole model.

A rank holds boxes of whole tensors: (name, shape of the whole, offset). Names are those of the Hugging Face model that
the stages were cut from; a weight that two of its modules share has one name. Optimizer state is named
`optimizer/KEY/NAME`. The boxes of all ranks cover every tensor; where ranks hold copies (`parallel.shard_size`, or a
weight that tensor parallelism leaves whole) each box has one writer, and the writers take turns.

Cost: nothing is copied; a slice is a view of the rank's memory without FSDP2's padding.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from bytescale.arrays import IntArray
from bytescale.runtime.flat import flat_shapes
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.sharded import is_split


@dataclass(frozen=True, eq=False)
class Slice:
    """A box of a whole tensor, and this rank's memory of it.

    Attributes:
        name: of the whole tensor.
        shape: of the whole tensor.
        offset: where the box begins.
        tensor: the box; a view, writing to it writes to the model.
        is_written: whether this rank stores it; elsewhere another rank stores the same box.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    is_written: bool = True


def model_slices(model: LossModel) -> list[Slice]:
    """What this rank holds of `model`, which may be sharded: parameters, and the buffers that are stored with it."""
    flat = flat_shapes(model.decoder)
    parameters = [
        found
        for turn, (name, parameter) in enumerate(model.decoder.named_parameters())
        for found in _slices(
            model.whole_name(name), parameter, turn, may_write=_may_write(model, parameter), flat=flat.get(name)
        )
    ]
    return parameters + _buffer_slices(model)


def _buffer_slices(model: LossModel) -> list[Slice]:
    """The buffers of `model` that are part of its state; every rank of a stage has all of them."""
    stored = set(model.decoder.state_dict(keep_vars=True))
    first, is_ours = next(model.parameters()), model.tp is None or model.tp.rank == 0
    return [
        Slice(model.whole_name(name), tuple(buffer.shape), (0,) * buffer.ndim, buffer.detach(), is_written)
        for turn, (name, buffer) in enumerate(model.decoder.named_buffers())
        if name in stored
        # What is in no layer is on every stage.
        for is_written in [is_ours and _is_first_shard(first, turn) and (model.is_first or ".layers." in f".{name}")]
    ]


def optimizer_slices(model: LossModel, optimizer: torch.optim.Optimizer) -> list[Slice]:
    """What this rank holds of the state of `optimizer`; a parameter that was never updated has none."""
    flat = flat_shapes(model.decoder)
    found: list[Slice] = []
    for turn, (name, parameter) in enumerate(model.decoder.named_parameters()):
        for key, value in optimizer.state.get(parameter, {}).items():
            may_write = _may_write(model, parameter) and (value.ndim > 0 or _is_first_shard(parameter, turn))
            shape = flat.get(name) if value.ndim > 0 else None
            found += _slices(state_name(key, model.whole_name(name)), value, turn, may_write=may_write, flat=shape)
    return found


def _may_write(model: LossModel, parameter: torch.nn.Parameter) -> bool:
    """Whether this rank is of those that store `parameter`: not a copy for a stage, nor one of another TP rank."""
    is_ours = model.tp is None or model.tp.rank == 0 or is_split(parameter)
    return is_ours and parameter is not model.copied_weight()


def make_optimizer_state(model: LossModel, optimizer: torch.optim.Optimizer, stored: Iterable[str]) -> None:
    """Give `optimizer` zeros for every state named in `stored`, for `optimizer_slices` to point to.

    A state is a tensor of its parameter's shape, or, where it is called `step`, a number.
    """
    by_name: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith(_STATE):
            _, key, parameter_name = name.split("/", 2)
            by_name.setdefault(parameter_name, []).append(key)
    for name, parameter in model.decoder.named_parameters():
        for key in by_name.get(model.whole_name(name), ()):
            zeros = torch.zeros(()) if key == "step" else torch.zeros_like(parameter, requires_grad=False)
            optimizer.state[parameter][key] = zeros


_STATE = "optimizer/"


def state_name(key: str, parameter_name: str) -> str:
    """Name of the state `key` of a parameter."""
    return f"{_STATE}{key}/{parameter_name}"


def _slices(
    name: str, tensor: torch.Tensor, turn: int, *, may_write: bool, flat: tuple[int, ...] | None = None
) -> Iterator[Slice]:
    """The boxes of `tensor` here. `flat` is its shape in the model, where it is stored as a column of its elements."""
    shape = tuple(tensor.shape)
    local = local_part(tensor)
    is_written = may_write and _has_turn(tensor, turn)
    if flat is not None:
        for run in _runs(_held(tensor)[0]):
            elements = local.flatten()[run.local_begin : run.local_begin + run.length]
            for offset, size in boxes_of_range(flat, run.begin, run.begin + run.length):
                part, elements = elements[: math.prod(size)].view(size), elements[math.prod(size) :]
                yield Slice(name, tuple(flat), offset, part, is_written)
        return
    runs = [_runs(indices) for indices in _held(tensor)]
    for box in product(*runs):
        part = local
        for dim, run in enumerate(box):
            part = part.narrow(dim, run.local_begin, run.length)
        yield Slice(name, shape, tuple(run.begin for run in box), part, is_written)


def boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the boxes that elements begin..end of a tensor, counted row by row, fill one after the other.

    Whole rows are one box; at most one broken row before and one after them are cut further.
    """
    if len(shape) == 1:
        if end > begin:
            yield (begin,), (end - begin,)
        return
    row, inner = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    while begin < end:
        at, first = divmod(begin, row)
        rows = (end - begin) // row
        if first == 0 and rows:
            yield (at, *inner), (rows, *shape[1:])
            begin += rows * row
        else:
            last = min(row, end - at * row)
            for offset, size in boxes_of_range(shape[1:], first, last):
                yield (at, *offset), (1, *size)
            begin = at * row + last


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor, sharded or not."""
    detached = tensor.detach()
    local: torch.Tensor = detached.to_local() if isinstance(detached, DTensor) else detached
    return local


@dataclass(frozen=True)
class _Run:
    """Neighbouring indices of one dimension: where in the whole, where in this rank's part, how many."""

    begin: int
    local_begin: int
    length: int


def _held(tensor: torch.Tensor) -> list[IntArray]:
    """The indices of the whole that this rank holds, a column for each dimension."""
    held = [np.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        # Tensor parallelism, the last axis, cuts first, and FSDP2 what it leaves, along the same dimension or not.
        for placement, size, index in reversed(_axes(tensor)):
            if not placement.is_replicate():
                indices = held[placement.dim]
                length, begin = Shard(placement.dim).local_shard_size_and_offset(len(indices), size, index)
                held[placement.dim] = indices[begin : begin + length]
    return held


def _axes(tensor: DTensor) -> list[tuple[Any, int, int]]:
    """Of every dimension of the mesh: placement, ranks, and which of them this one is."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own mesh"
    return [(p, mesh.size(dim), coordinate[dim]) for dim, p in enumerate(tensor.placements)]


def _runs(indices: IntArray) -> list[_Run]:
    """`indices`, which ascend, as runs of neighbours."""
    if not len(indices):
        return []
    begins = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(indices))
    return [_Run(int(indices[b]), int(b), int(n)) for b, n in zip(begins, lengths, strict=True)]


def _has_turn(tensor: torch.Tensor, turn: int) -> bool:
    """Whether of the ranks that hold the same part it is this one that writes."""
    number, index = 1, 0
    for placement, size, place in _axes(tensor) if isinstance(tensor, DTensor) else ():
        if isinstance(placement, Replicate):
            number, index = number * size, index * size + place
    return index == turn % number


def _is_first_shard(parameter: torch.Tensor, turn: int) -> bool:
    """Whether this rank writes what is one number for all shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return True
    return _has_turn(parameter, turn) and all(
        place == 0 for placement, _, place in _axes(parameter) if not isinstance(placement, Replicate)
    )


def num_bytes(slices: Iterable[Slice]) -> int:
    """Bytes that this rank stores of `slices`."""
    return sum(math.prod(s.tensor.shape) * s.tensor.element_size() for s in slices if s.is_written)
