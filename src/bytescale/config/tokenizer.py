"""Which tokenizer a run uses, decided once: what is stated, else what the checkpoint brings, else bytes.

A checkpoint's weights know the ids of one tokenizer only, so a checkpoint without a stated tokenizer uses the
`tokenizer.json` beside its weights, or `byte` where its configuration says that bytes trained it. One that says nothing
is refused when the run is prepared. Only fresh models start with bytes.
"""

import dataclasses
import json
import os
from pathlib import Path

from bytescale.config.data import BYTE_TOKENIZER
from bytescale.config.schema import Config
from bytescale.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
TRAINED_BY = "bytescale_tokenizer"
"""Key of a saved config.json that says which tokenizer trained the model, where that is no file: `byte`."""


def settle_tokenizer(config: Config) -> Config:
    """`config` with `data.tokenizer` stated; None stays where a checkpoint brings no tokenizer."""
    if config.data.tokenizer is not None:
        return config
    path = None if config.model.path is None else Path(config.model.path)
    tokenizer = BYTE_TOKENIZER if path is None else own_tokenizer(path)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))


def check_tokenizer(config: Config) -> None:
    """Whether `config` says which tokenizer is used.

    Raises:
        UserError: it trains a checkpoint that says nothing, and says nothing itself.
    """
    if config.data.tokenizer is None and config.model.path is not None:
        raise UserError(
            f"model.path = {config.model.path} brings no {TOKENIZER_FILE}; set data.tokenizer to the tokenizer that "
            'trained it, or to "byte"'
        )


def own_tokenizer(checkpoint: Path) -> str | None:
    """What `data.tokenizer` is for a checkpoint by its own word; None where it says nothing."""
    file = checkpoint / TOKENIZER_FILE
    # `os.path` takes a name that no file can have for a file that is not there.
    if os.path.isfile(file):
        return str(file)
    try:
        stated = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    trained_by_bytes = isinstance(stated, dict) and stated.get(TRAINED_BY) == BYTE_TOKENIZER
    return BYTE_TOKENIZER if trained_by_bytes else None


def file_of(tokenizer: str) -> Path:
    """The tokenizer.json that `data.tokenizer` names; not for `byte`."""
    path = Path(tokenizer)
    return path / TOKENIZER_FILE if os.path.isdir(path) else path


def is_own(config: Config) -> bool:
    """Whether the run trains a checkpoint with the tokenizer that the checkpoint brings."""
    stated = config.data.tokenizer
    own = None if config.model.path is None else own_tokenizer(Path(config.model.path))
    if stated is None or own is None or BYTE_TOKENIZER in (stated, own):
        return stated is not None and stated == own
    try:
        return file_of(stated).samefile(own) or file_of(stated).read_bytes() == Path(own).read_bytes()
    except OSError:
        return False
