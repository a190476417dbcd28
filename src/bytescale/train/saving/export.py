"""A checkpoint of a run as a model for other programs: what the run itself saves at its end, from any of its steps.

No ranks are needed and no model is built but an empty one, which knows names and arrangements: whole tensors are read
from the boxes that the ranks wrote, one at a time, and written. The checkpoint alone says what the model is; tokenizer
and side files come from where the run found them. Cost: memory of one tensor (of one layer where Transformers stores a
layer's weights in another arrangement), one pass to prove the checkpoint and one to read it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bytescale.checkpoint.reader import TensorReader
from bytescale.checkpoint.stored import StoredCheckpoint
from bytescale.checkpoint.weights_file import num_bytes, split_by_size
from bytescale.config.schema import DType
from bytescale.config.toml import config_from_dict
from bytescale.data import load_tokenizer
from bytescale.errors import UserError
from bytescale.runtime.device import TORCH_DTYPES
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.hf_config import quiet_transformers
from bytescale.train.run_dir import writing
from bytescale.train.saving.checkpoint import (
    MAX_FILE_BYTES,
    Group,
    as_stored,
    file_names,
    saved_config,
    stored_specs,
    weight_groups,
    write_weights,
    write_weights_index,
)
from bytescale.train.saving.model_dir import replacing
from bytescale.train.saving.side_files import write_side_files


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: of the checkpoint.
        dtype: of the weights.
        num_files: files of weights.
        num_bytes: bytes of weights.
    """

    step: int
    dtype: str
    num_files: int
    num_bytes: int


def export_model(
    stored: StoredCheckpoint, target: Path, dtype: DType | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> Exported:
    """Write the model of `stored` to the directory `target`, which appears whole or not at all.

    Args:
        stored: the checkpoint.
        target: absent, or an empty directory.
        dtype: of the weights; None takes the run's type of compute.
        max_file_bytes: largest file of weights, unless a tensor is larger.

    Raises:
        UserError: the checkpoint is damaged, or what the run began from is gone.
        RunError: the disk is full.
    """
    if (problem := stored.damage()) is not None:
        raise UserError(problem)
    made_by = stored.values["made_by"]
    config = config_from_dict(made_by["config"])
    if config.model.path is not None and not Path(config.model.path).is_dir():
        raise UserError(f"{stored.path} goes back to model.path = {config.model.path}, whose side files are gone")
    tokenizer = load_tokenizer(config.data)
    model = _empty_model(made_by["model"], is_tied=stored.values["is_tied"])
    name_of_type = dtype or config.train.dtype
    torch_dtype = TORCH_DTYPES[name_of_type]
    groups = list(weight_groups(model))
    files = split_by_size(
        [spec for group in groups for spec in stored_specs(model, group, torch_dtype)], max_file_bytes
    )
    by_name = dict(zip(file_names(len(files)), files, strict=True))
    with writing(target), replacing(target) as directory, stored.tensors() as reader:
        write_weights(directory, by_name, _read(reader, model, groups, torch_dtype))
        write_weights_index(directory, [(name, spec) for name, specs in by_name.items() for spec in specs])
        model_config = saved_config(
            model, model.decoder.config, tokenizer, replace(config, train=replace(config.train, dtype=name_of_type))
        )
        model_config.save_pretrained(directory)
        write_side_files(directory, config, model_config, tokenizer)
    return Exported(
        stored.values["step"], name_of_type, len(files), sum(num_bytes(spec) for specs in files for spec in specs)
    )


def _read(
    reader: TensorReader, model: LossModel, groups: list[Group], dtype: torch.dtype
) -> Iterator[dict[str, torch.Tensor]]:
    for group in groups:
        yield as_stored(model, {name: reader.whole(name) for name in group}, dtype)


def _empty_model(facts: dict[str, Any], *, is_tied: bool) -> LossModel:
    """The model that a checkpoint's facts describe, without memory for its weights.

    Raises:
        UserError: this version of Transformers does not know it.
    """
    quiet_transformers()
    table = {**facts, "tie_word_embeddings": is_tied}
    try:
        config = CONFIG_MAPPING[table.pop("model_type")].from_dict(table)
        with torch.device("meta"):
            decoder = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the model of the checkpoint, {facts.get('model_type')!r}, cannot be described: {reason}"
        ) from None
    return LossModel(decoder)
