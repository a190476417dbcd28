"""The trained model as a Hugging Face checkpoint: safetensors in the type of the training, config.json, tokenizer.

Written to a temporary directory beside the target and renamed; a previous model of the same run directory is replaced
only once the new one is whole.
"""

import shutil
import tempfile
from pathlib import Path

from bytescale.config import Config
from bytescale.runtime.model import LossModel
from bytescale.runtime.states import TORCH_DTYPES, full_state
from bytescale.train.world import World

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def save_model(model: LossModel, target: Path, config: Config, world: World) -> None:
    """Gather the parameters and write them on rank 0; a collective."""
    state = full_state(model)
    if world.rank != 0:
        return
    dtype = TORCH_DTYPES[config.train.dtype]
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        decoder = model.decoder
        decoder.config.dtype = dtype
        decoder.save_pretrained(temporary, state_dict=state)
        for source in _tokenizer_files(config):
            if not (temporary / source.name).exists():
                shutil.copyfile(source, temporary / source.name)
        temporary.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _tokenizer_files(config: Config) -> list[Path]:
    """What belongs to the tokenizer, from the checkpoint that was trained on or from beside the tokenizer file."""
    if config.data.tokenizer != "byte":
        directory = Path(config.data.tokenizer)
        directory = directory if directory.is_dir() else directory.parent
    elif config.model.path is not None:
        directory = Path(config.model.path)
    else:
        return []
    return [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
