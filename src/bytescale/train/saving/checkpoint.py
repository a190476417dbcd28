"""The trained model as Transformers would save it: safetensors, config.json, and the files beside them.

Weights are stored in the type of compute, which config.json names; fp32 masters behind bfloat16 compute are rounded.
A weight that two modules share is stored once, and config.json says whether embedding and head are one.

The first rank of each pipeline stage writes its stage's files, world rank 0 the index and everything else. Invariant:
no rank holds more than one whole parameter at a time, or one layer where Transformers stores a layer's weights in
another arrangement; ranks that do not write drop what they help to gather. The model appears whole or not at all
(`bytescale.train.saving.model_dir`); with a pipeline all first ranks of stages must see the run directory.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.core_model_loading import revert_weight_conversion

from bytescale.checkpoint.weights_file import TensorSpec, WeightsFile, num_bytes, split_by_size
from bytescale.config.data import BYTE_TOKENIZER
from bytescale.config.schema import Config
from bytescale.config.tokenizer import TRAINED_BY, is_own
from bytescale.data import Tokenizer
from bytescale.errors import RunError, UserError
from bytescale.files import write_text_atomically
from bytescale.runtime.device import TORCH_DTYPES
from bytescale.runtime.flat import flat_shapes
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.sharded import whole_tensor
from bytescale.runtime.world import World
from bytescale.train.prepare import Prepared
from bytescale.train.run_dir import is_seen, writing
from bytescale.train.saving.model_dir import replacing, under_way
from bytescale.train.saving.side_files import write_side_files

MAX_FILE_BYTES = 50 * 1000**3
"""Largest file of weights, as in Transformers."""


class Weight(NamedTuple):
    """A parameter or buffer, sharded or whole, and its shape in the model."""

    tensor: torch.Tensor
    shape: torch.Size


Group = dict[str, Weight]
"""Weights by the names of the whole model, gathered and stored together."""


def save_model(
    model: LossModel,
    prepared: Prepared,
    target: Path,
    config: Config,
    world: World,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model of all stages to the directory `target`; a collective.

    Raises:
        RunError: the disk is full, or a stage does not see the directory.
    """
    writes = world.hdp_rank == world.tp_rank == 0
    dtype = TORCH_DTYPES[config.train.dtype]
    groups = list(weight_groups(model))
    files = split_by_size([spec for group in groups for spec in stored_specs(model, group, dtype)], max_file_bytes)
    with writing(target), replacing(target) if world.rank == 0 else nullcontext(under_way(target)) as directory:
        # The directory exists before anyone passes this line.
        numbers = world.all_gather_numbers([len(files)])[:: world.stage_size, 0].long().tolist()
        names = file_names(sum(numbers))[sum(numbers[: world.stage]) :][: len(files)]
        if writes and not is_seen(directory):
            raise RunError(_not_shared(world, directory))
        stored = (_gathered(model, group, dtype, keep=writes) for group in groups)
        write_weights(directory, dict(zip(names, files, strict=True)) if writes else {}, stored)
        listing = [(name, spec) for name, specs in zip(names, files, strict=True) for spec in specs] if writes else []
        listings = world.gather_objects(listing)
        if world.rank == 0:
            write_weights_index(directory, [entry for listing in listings for entry in listing])
            model_config = saved_config(model, prepared.model_config, prepared.tokenizer, config)
            model_config.save_pretrained(directory)
            write_side_files(directory, config, model_config, prepared.tokenizer)


def check_shared(run_dir: Path, world: World, patience_s: float = 60.0) -> None:
    """Whether every rank that will write a part of the model sees `run_dir`, which rank 0 has opened; a collective.

    Raises:
        UserError: it does not, as on two hosts without a common disk.
    """
    if world.pp_size == 1:
        return
    # Nobody passes this line before rank 0 has written its files.
    world.all_gather_numbers([0.0])
    if world.hdp_rank == world.tp_rank == 0 and not is_seen(run_dir / "processes.json", patience_s):
        raise UserError(_not_shared(world, run_dir))


def _not_shared(world: World, directory: Path) -> str:
    return (
        f"stage {world.stage} does not see {directory}; with a pipeline run.dir must be on a disk that all hosts "
        "share, or set run.save_model = false"
    )


def saved_config(model: LossModel, model_config: Any, tokenizer: Tokenizer, config: Config) -> Any:
    """The Hugging Face configuration that describes the stored weights and the tokenizer that trained them."""
    result = copy.deepcopy(model_config)
    result.dtype = config.train.dtype
    result.architectures = [type(model.decoder).__name__]
    if hasattr(result, "tie_word_embeddings"):
        result.tie_word_embeddings = model.is_tied
    if hasattr(result, TRAINED_BY):
        delattr(result, TRAINED_BY)
    if config.data.tokenizer == BYTE_TOKENIZER:
        setattr(result, TRAINED_BY, BYTE_TOKENIZER)
    if config.model.path is not None and not is_own(config):
        # The ids in the checkpoint are those of the tokenizer that it came with.
        result.bos_token_id, result.eos_token_id, result.pad_token_id = tokenizer.begin_id, tokenizer.end_id, None
    return result


def weight_groups(model: LossModel) -> Iterator[Group]:
    """The parameters of this stage, in order: each alone, or those of a layer where they are stored rearranged."""
    shapes = flat_shapes(model.decoder)
    ignored = set(getattr(model.decoder, "_keys_to_ignore_on_save", None) or ())
    copied = model.copied_weight()
    seen: set[int] = set()
    by_layer: dict[str, Group] = {}
    for name_here, tensor in model.decoder.state_dict(keep_vars=True).items():
        name = model.whole_name(name_here)
        if name in ignored or id(tensor) in seen or tensor is copied:
            continue
        seen.add(id(tensor))
        match = re.search(r"(^|\.)layers\.\d+\.", name)
        weight = Weight(tensor, shapes.get(name_here, tensor.shape))
        by_layer.setdefault(name[: match.end()] if match else name, {})[name] = weight
    for group in by_layer.values():
        if set(revert_weight_conversion(model.decoder, _on_meta(group))) == set(group):
            yield from ({name: weight} for name, weight in group.items())
        else:
            yield group


def _on_meta(group: Group) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=tensor.dtype, device="meta") for name, (tensor, shape) in group.items()}


def stored_specs(model: LossModel, group: Group, dtype: torch.dtype) -> list[TensorSpec]:
    """What `as_stored` will return, without a byte of data."""
    return [(n, t.dtype, tuple(t.shape)) for n, t in as_stored(model, _on_meta(group), dtype).items()]


def as_stored(model: LossModel, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole tensors of a group in the type and the arrangement that they are stored in."""
    typed = {name: t.to(dtype if t.is_floating_point() else t.dtype) for name, t in weights.items()}
    arranged: dict[str, torch.Tensor] = revert_weight_conversion(model.decoder, typed)
    return arranged


def _gathered(model: LossModel, group: Group, dtype: torch.dtype, *, keep: bool) -> dict[str, torch.Tensor]:
    """The whole tensors of `group` as they are stored; a collective of the stage, nothing where `keep` is False."""
    gathered = {}
    for name, (tensor, shape) in group.items():
        whole = whole_tensor(tensor.detach(), shape)
        if keep:
            gathered[name] = whole.to(dtype if whole.is_floating_point() else whole.dtype).cpu()
    return as_stored(model, gathered, dtype) if keep else {}


def write_weights(
    directory: Path, files: Mapping[str, Sequence[TensorSpec]], groups: Iterable[dict[str, torch.Tensor]]
) -> None:
    """Write the tensors of `groups`, as they come, to the files that are to hold them; groups are emptied."""
    with ExitStack() as stack:
        opened: dict[str, WeightsFile] = {}
        for name, specs in files.items():
            file = stack.enter_context(WeightsFile(directory / name, specs))
            opened |= {spec[0]: file for spec in specs}
        for group in groups:
            # A group must not live on while the next one is made.
            for name in list(group):
                opened[name].put(name, group.pop(name))


def file_names(total: int) -> list[str]:
    """Names of `total` files of weights, as Transformers has them."""
    if total == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]


def write_weights_index(directory: Path, listing: list[tuple[str, TensorSpec]]) -> None:
    """Say which file holds which tensor, where there is more than one."""
    if len({file for file, _ in listing}) == 1:
        return
    parameters = sum(num_bytes(spec) // spec[1].itemsize for _, spec in listing)
    metadata = {"total_parameters": parameters, "total_size": sum(num_bytes(spec) for _, spec in listing)}
    index = {"metadata": metadata, "weight_map": {spec[0]: file for file, spec in sorted(listing, key=str)}}
    write_text_atomically(directory / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
