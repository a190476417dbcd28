"""What a saved model needs besides weights and configuration for another program to use it.

A checkpoint's own files are carried on: everything but weights, optimizer states and code. Those of its tokenizer only
when that tokenizer trained; when another did, that one is stored as `tokenizer.json` with what lies beside it. Bytes
are no file. `tokenizer_config.json` always names the token that ended documents in training, and
`generation_config.json` counts it among the tokens that stop a generation.
"""

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from bytescale.config.data import BYTE_TOKENIZER
from bytescale.config.schema import Config
from bytescale.config.tokenizer import TOKENIZER_FILE, file_of, is_own
from bytescale.data.tokenizers import Tokenizer
from bytescale.files import write_text_atomically

_NOT_CARRIED = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data"),
    *("*.index.json", "config.json", "generation_config.json", "adapter_config.json", "trainer_state.json"),
    *("*.py", "*.pyc", "*.so", "*.sh", "*.ipynb", ".*", "__pycache__", "checkpoint-*", "runs"),
    *("optimizer*", "scheduler*", "rng_state*", "training_args*", "*.distcp"),
)
_OF_THE_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken"),
    *("spiece.model", "sentencepiece*", "chat_template*", "additional_chat_templates"),
)
_COMMON_TOKENS = {
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "unk_token": ("<unk>", "<|unk|>", "[UNK]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
}
"""Roles that a tokenizer.json alone does not tell, by the names that are in use for them."""

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"


def write_side_files(directory: Path, config: Config, model_config: Any, tokenizer: Tokenizer) -> None:
    """Fill `directory`, which holds the weights, with everything else but config.json.

    Args:
        directory: the new model.
        config: of the run; its tokenizer is settled.
        model_config: as stored.
        tokenizer: the one that trained.
    """
    checkpoint = None if config.model.path is None else Path(config.model.path)
    own = is_own(config)
    if checkpoint is not None:
        _copy(checkpoint, directory, without=() if own else _OF_THE_TOKENIZER)
    if config.data.tokenizer not in (None, BYTE_TOKENIZER):
        file = file_of(str(config.data.tokenizer))
        if not own and file.name == TOKENIZER_FILE:
            _copy(file.parent, directory, only=_OF_THE_TOKENIZER)
        shutil.copyfile(file, directory / TOKENIZER_FILE)
        _write_tokenizer_config(directory, config, tokenizer)
    stored = None if checkpoint is None else _json(checkpoint / GENERATION_CONFIG)
    if stored is None:
        stored = GenerationConfig.from_model_config(model_config).to_diff_dict()
    elif not own:
        stored = {key: value for key, value in stored.items() if not key.endswith(("_token_id", "_token_ids"))}
    write_text_atomically(directory / GENERATION_CONFIG, _text(with_stop_token(stored, tokenizer.end_id)))


def with_stop_token(settings: dict[str, Any], end_id: int) -> dict[str, Any]:
    """Generation settings that stop at `end_id` too."""
    stated = settings.get("eos_token_id")
    stops = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if end_id in stops:
        return settings
    return settings | {"eos_token_id": [*stops, end_id] if stops else end_id}


def _write_tokenizer_config(directory: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Name the special tokens; stated ones stay, but the end token is the one that the run was told to use."""
    path = directory / TOKENIZER_CONFIG
    names = _json(directory / TOKENIZER_FILE) or {}
    special = {token["content"]: token["id"] for token in names.get("added_tokens", ()) if token.get("special")}
    vocabulary = special | {token["content"]: token["id"] for token in names.get("added_tokens", ())}
    model = names.get("model", {})
    if isinstance(model.get("vocab"), dict):
        vocabulary = model["vocab"] | vocabulary
    end = next((content for content, number in vocabulary.items() if number == tokenizer.end_id), None)
    settings = _json(path)
    if settings is None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for role, known in _COMMON_TOKENS.items():
            if found := [name for name in known if name in special]:
                settings[role] = found[0]
    if end is not None and (settings.get("eos_token") is None or config.data.end_token is not None):
        settings["eos_token"] = end
    write_text_atomically(path, _text(settings))


def _copy(source: Path, target: Path, only: tuple[str, ...] = ("*",), without: tuple[str, ...] = ()) -> None:
    for path in source.iterdir():
        if _matches(path, only) and not _matches(path, without):
            for file in _files(path):
                place = target / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)


def _files(path: Path) -> Iterator[Path]:
    """The files at and below `path` that a model carries on; links are followed to files only."""
    if _matches(path, _NOT_CARRIED):
        return
    if path.is_file():
        yield path
    elif path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            yield from _files(inner)


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
