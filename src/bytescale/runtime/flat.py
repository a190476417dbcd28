"""Parameters stored as one column where no dimension of theirs can be shared out evenly.

FSDP2 cuts a parameter along one dimension, and pads the first to whole rows: over 1,024 ranks [3584, 18944] would store
and send 14 % more, [512, 3584] twice as much. As a column [numel, 1] it stores less than a row a rank more. Modules do
not notice: in a step the attribute is the column seen as the matrix that it is; between steps, when every rank has its
shard, it is the parameter itself. Two dimensions are kept so that what goes by their number (weight decay) still holds.

Invariant: name, values and gradient of a parameter do not depend on how it is stored. Cost: one view a use of a weight.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def store_flat(model: nn.Module, wanted: Callable[[torch.Size], bool]) -> None:
    """Store the plain parameters of `model` whose shape is `wanted` as columns, in place, before they are sharded.

    A parameter that several modules share stays one. What is sharded already (a DTensor) is left alone.
    """
    columns: dict[int, nn.Parameter] = {}
    for module in model.modules():
        shapes: dict[str, torch.Size] = {}
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor) and wanted(parameter.shape):
                if id(parameter) not in columns:
                    column = parameter.detach().reshape(-1, 1)
                    columns[id(parameter)] = nn.Parameter(column, requires_grad=parameter.requires_grad)
                module._parameters[name] = columns[id(parameter)]
                shapes[name] = parameter.shape
        if shapes:
            module.__class__ = _flat_class(type(module), shapes)


def flat_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shape in the model of every parameter that is stored as a column, by name; a shared one by all its names."""
    return dict(_flat_shapes(model))


def _flat_shapes(model: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, shape in getattr(type(module), "_flat_shapes", {}).items():
            yield f"{prefix}.{name}" if prefix else name, shape


def _flat_class(kind: type[nn.Module], shapes: dict[str, torch.Size]) -> type[nn.Module]:
    """`kind` with attributes that show columns in `shapes`."""
    views: dict[str, Any] = {name: property(partial(_view, name, shape)) for name, shape in shapes.items()}
    return type(kind.__name__, (kind,), views | {"_flat_shapes": shapes, "__module__": kind.__module__})


def _view(name: str, shape: torch.Size, module: nn.Module) -> torch.Tensor:
    stored = module._parameters[name]
    assert stored is not None
    return stored if isinstance(stored, DTensor) else stored.view(shape)
