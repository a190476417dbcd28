"""The trained model as a Hugging Face checkpoint: safetensors in the type of the training, config.json, tokenizer.

Written to a temporary directory beside the target and renamed; a previous model of the same run directory is replaced
only once the new one is whole.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from bytescale.config.schema import Config
from bytescale.errors import RunError
from bytescale.runtime.fsdp import TORCH_DTYPES, full_state
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.world import World
from bytescale.train.model_dir import replacing
from bytescale.train.prepare import Prepared
from bytescale.train.run_dir import writing

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def save_model(model: LossModel, prepared: Prepared, target: Path, config: Config, world: World) -> None:
    """Gather the parameters of all stages and write them on rank 0; a collective."""
    state = with_whole_names(full_state(model), prepared.stages[world.stage])
    if world.pp_size > 1:
        parts = world.gather_objects(state if world.hdp_rank == 0 else {})
        state = {name: tensor for part in parts for name, tensor in part.items()}
    if world.rank != 0:
        return
    dtype = TORCH_DTYPES[config.train.dtype]
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    decoder = model.decoder if world.pp_size == 1 else _skeleton(prepared.model_config)
    decoder.config.dtype = dtype
    with writing(target):
        _write(decoder, state, target, config)


def _skeleton(model_config: Any) -> Any:
    """The whole model without storage: its class knows how a checkpoint of it is written."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config)


def with_whole_names(state: dict[str, torch.Tensor], layers: range) -> dict[str, torch.Tensor]:
    """Names as in the whole model, where this stage's layer 0 is `layers[0]`."""

    def whole(match: re.Match[str]) -> str:
        return f"{match[1]}layers.{layers[int(match[2])]}."

    return {re.sub(r"(^|\.)layers\.(\d+)\.", whole, name, count=1): tensor for name, tensor in state.items()}


def _write(decoder: Any, state: dict[str, torch.Tensor], target: Path, config: Config) -> None:
    try:
        with replacing(target) as directory:
            decoder.save_pretrained(directory, state_dict=state)
            for source in _tokenizer_files(config):
                if not (directory / source.name).exists():
                    shutil.copyfile(source, directory / source.name)
    except SafetensorError as error:
        raise RunError(f"cannot write {target}: {error}") from error


def _tokenizer_files(config: Config) -> list[Path]:
    """What belongs to the tokenizer, from the checkpoint that was trained on or from beside the tokenizer file."""
    if config.data.tokenizer not in (None, "byte"):
        assert config.data.tokenizer is not None
        directory = Path(config.data.tokenizer)
        directory = directory if directory.is_dir() else directory.parent
    elif config.model.path is not None:
        directory = Path(config.model.path)
    else:
        return []
    return [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
