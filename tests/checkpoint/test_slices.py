"""Slices: every element once, whatever the layout; and any layout reads what any other wrote."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from bytescale.checkpoint.index import Index, file_index, merge, read_index, write_index
from bytescale.checkpoint.reader import TensorReader
from bytescale.checkpoint.slices import (
    Slice,
    _slices,
    boxes_of_range,
    make_optimizer_state,
    model_slices,
    optimizer_slices,
)
from bytescale.checkpoint.weights_file import write_tensors
from bytescale.config.schema import TrainConfig
from bytescale.errors import UserError
from bytescale.files import file_digest
from bytescale.runtime.flat import flat_shapes
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.stages import stage_model
from bytescale.runtime.sharded import whole_tensor
from bytescale.train.optimizer import make_optimizer
from tests.ranks import RankPool, Ranks
from tests.runtime.models import UNEVEN, WITH_BUFFERS, even_stages, small_decoder, world_of

STEPS = 3


def sharded(
    ranks: Ranks, architecture: str, tied: bool, pp_size: int, shard_size: int | None, tp_size: int, seed: int
) -> tuple[LossModel, torch.optim.Optimizer]:
    """A model in some layout. Three layers of sizes that hardly any number of ranks divides, tied ones as columns."""
    sizes = UNEVEN if tied else {"intermediate_size": 51}
    decoder = small_decoder(architecture, seed, tie_word_embeddings=tied, num_hidden_layers=3, vocab_size=97, **sizes)
    world = world_of(ranks, pp_size=pp_size, shard_size=shard_size, tp_size=tp_size)
    model = stage_model(decoder, even_stages(decoder, pp_size), world.stage)
    shard_model(model, world, torch.float32)
    return model, make_optimizer(model, TrainConfig(lr=1e-2))


def state_of(slices: list[Slice], model: LossModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors by name, as FSDP2 puts them together; a collective."""
    found, shapes = {}, flat_shapes(model.decoder)
    for name, parameter in model.decoder.named_parameters():
        shape = shapes.get(name)
        found[model.whole_name(name)] = whole_tensor(parameter.detach(), shape).clone()
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/{key}/{model.whole_name(name)}"] = whole_tensor(
                value, shape if value.ndim else None
            ).clone()
    assert {piece.name for piece in slices} <= set(found)
    return found


def _store(ranks: Ranks, directory: Path, layout: Any) -> Any:
    """Take steps with made-up gradients and store all; what lies where, and the whole tensors of this rank's stage."""
    model, optimizer = sharded(ranks, *layout, seed=1)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1 + 1e-3
        optimizer.step()
    slices = model_slices(model) + optimizer_slices(model, optimizer)
    tensors, index = file_index(f"rank-{ranks.rank}.safetensors", slices)
    path = directory / f"rank-{ranks.rank}.safetensors"
    assert write_tensors(path, tensors) == file_digest(path)
    return index, state_of(slices, model, optimizer)


def _load(ranks: Ranks, directory: Path, index: Index, layout: Any) -> Any:
    model, optimizer = sharded(ranks, *layout, seed=2)
    make_optimizer_state(model, optimizer, index)
    slices = model_slices(model) + optimizer_slices(model, optimizer)
    with TensorReader(directory, index) as reader:
        reader.load(slices)
    return state_of(slices, model, optimizer)


LAYOUTS: list[tuple[int, tuple[int, int | None, int]]] = [
    (1, (1, None, 1)),
    (3, (1, None, 1)),
    (4, (1, 2, 1)),
    (4, (2, None, 1)),
    (3, (3, None, 1)),
    (8, (1, None, 1)),
]
"""Ranks, and (pipeline stages, ranks of a copy, TP ranks)."""
WITH_TP = [(4, (1, None, 2)), (6, (1, None, 2)), (8, (2, None, 2)), (8, (1, 2, 2))]
"""Three ranks cut the rows of what two TP ranks cut already, unevenly."""


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("mixtral", False)])
def test_any_layout_reads_what_any_other_wrote(ranks: RankPool, tmp_path: Path, architecture: str, tied: bool) -> None:
    # The heads of the sizes that are stored as columns cannot be shared.
    layouts = LAYOUTS if tied else LAYOUTS + WITH_TP
    for number, (size, layout) in enumerate(layouts):
        directory = tmp_path / str(number)
        directory.mkdir()
        stored = ranks.run(size, _store, directory, (architecture, tied, *layout))
        index = read_index(write_index(merge(index for index, _ in stored)).encode(), "index")
        expected = {name: tensor for _, state in stored for name, tensor in state.items()}
        assert set(index) == set(expected) and ("lm_head.weight" in index) == (not tied)
        # Each box once: `read_index` has proven that the parts have the elements of the whole.
        with TensorReader(directory, index) as reader:
            assert all(torch.equal(reader.whole(name), tensor) for name, tensor in expected.items())
        other_size, other = layouts[(number + 1) % len(layouts)]
        for state in ranks.run(other_size, _load, directory, index, (architecture, tied, *other)):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def _two_dimensions(ranks: Ranks, rows: int, tp_dim: int) -> Any:
    """A weight that tensor parallelism cut along `tp_dim` and FSDP2 then along its rows."""
    new_group = ranks.maker()

    def own(lines: list[list[int]]) -> Any:
        return next(group for line in lines if (group := new_group(line)) is not None and ranks.rank in line)

    mesh = DeviceMesh.from_group(
        [own([[0, 2], [1, 3]]), own([[0, 1], [2, 3]])],
        "cpu",
        torch.arange(4).view(2, 2),
        mesh_dim_names=("fsdp", "tp"),
    )
    weight = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4)
    module = torch.nn.Linear(4, rows, bias=False)
    module.weight = torch.nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(tp_dim)]))
    fully_shard(module, mesh=mesh["fsdp"])
    return [(p.offset, p.tensor.clone()) for p in _slices("w", module.weight, 0, may_write=True)], weight


@pytest.mark.parametrize(("rows", "tp_dim"), [(8, 0), (8, 1), (6, 0), (12, 0)])
def test_slices_of_two_dimensional_meshes(ranks: RankPool, rows: int, tp_dim: int) -> None:
    found = ranks.run(4, _two_dimensions, rows, tp_dim)
    weight = found[0][1]
    covered = torch.full_like(weight, -1)
    for slices, _ in found:
        for (row, column), tensor in slices:
            box = covered[row : row + tensor.shape[0], column : column + tensor.shape[1]]
            assert bool((box == -1).all())
            box.copy_(tensor)
    assert torch.equal(covered, weight)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_any_range_of_elements_is_boxes(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    boxes = list(boxes_of_range(tuple(shape), begin, end))
    found = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in boxes]
    assert torch.equal(torch.cat([*found, whole.new_zeros(0)]), torch.arange(begin, end))
    assert len(boxes) <= 2 * len(shape) - 1


def test_what_is_not_there_or_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors, index = file_index("f", [Slice("w", (2, 3), (0, 0), torch.ones(2, 3))])
    write_tensors(tmp_path / "f", tensors)
    with TensorReader(tmp_path, index) as reader:
        with pytest.raises(UserError, match="does not hold v; it is of another model"):
            reader.load([Slice("v", (2,), (0,), torch.ones(2))])
        with pytest.raises(UserError, match=r"holds w of shape \(2, 3\), the model has \(3, 2\)"):
            reader.load([Slice("w", (3, 2), (0, 0), torch.ones(3, 2))])
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-1])
    with TensorReader(tmp_path, index) as reader, pytest.raises(UserError, match="f cannot be read"):
        reader.whole("w")


@pytest.mark.parametrize("text", [b"", b"[]", b'{"w": {}}', b'{"w": {"dtype": "F33", "shape": [1], "parts": []}}'])
def test_what_is_no_index_is_refused(text: bytes) -> None:
    with pytest.raises(UserError, match="here is not the index of a checkpoint"):
        read_index(text, "here")


def test_parts_must_make_the_whole() -> None:
    _, index = file_index("f", [Slice("w", (4,), (0,), torch.ones(2)), Slice("w", (4,), (3,), torch.ones(2))])
    with pytest.raises(UserError, match="the parts of w do not make the whole"):
        read_index(write_index(index).encode(), "here")
    _, index = file_index("f", [Slice("w", (4,), (0,), torch.ones(2))])
    with pytest.raises(UserError, match="the parts of w do not make the whole"):
        read_index(write_index(index).encode(), "here")


def test_buffers_that_are_stored_with_the_weights_are_slices() -> None:
    model = LossModel(small_decoder("glm4_moe", **WITH_BUFFERS))
    slices = {piece.name: piece for piece in model_slices(model)}
    assert set(slices) == set(model.decoder.state_dict())
    (bias,) = (piece for name, piece in slices.items() if name.endswith("e_score_correction_bias"))
    assert bias.is_written and bias.shape == (4,)
    bias.tensor.fill_(7.0)
    assert model.decoder.state_dict()[bias.name].tolist() == [7.0] * 4
