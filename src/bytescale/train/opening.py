"""What a run says before its first step: every default that was taken, once, as one line each."""

import json
from pathlib import Path
from typing import Any

from bytescale.config.data import BYTE_TOKENIZER
from bytescale.config.schema import Config, ParallelConfig
from bytescale.config.tokenizer import file_of, is_own, own_tokenizer
from bytescale.data import Tokenizer
from bytescale.errors import counted
from bytescale.files import shown


def opening_lines(config: Config, model_config: Any, tokenizer: Tokenizer, world_size: int) -> tuple[str, ...]:
    """Model, tokenizer, special tokens, template, context and compute of a run; its data speaks for itself.

    Args:
        config: the run, with everything decided.
        model_config: Hugging Face configuration.
        tokenizer: makes the tokens.
        world_size: number of ranks.
    """
    facts = {
        "model": _model(config, model_config),
        "tokenizer": _tokenizer(config, tokenizer),
        "special tokens": _special_tokens(model_config, tokenizer),
        "template": _template(config),
        "context": _context(config, model_config),
        "compute": f"{config.train.dtype} on {_devices(config, world_size)}, {_recomputation(config)}",
        **_layout(config.parallel, world_size),
        "model saved": _saved(config),
    }
    width = max(map(len, facts))
    return tuple(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def _model(config: Config, model_config: Any) -> str:
    if config.model.path is not None:
        origin = f"weights of {shown(Path(config.model.path))}"
    elif config.model.preset is not None:
        origin = f"fresh weights, preset {config.model.preset}"
    else:
        origin = "fresh weights, [model.config]"
    layers = counted(model_config.num_hidden_layers, "layer")
    tied = "tied by its configuration" if getattr(model_config, "tie_word_embeddings", False) else "not tied"
    return f"{model_config.model_type} ({origin}), {layers}, vocabulary {model_config.vocab_size:,}, head {tied}"


def _tokenizer(config: Config, tokenizer: Tokenizer) -> str:
    name = config.data.tokenizer
    what = "byte" if name in (None, BYTE_TOKENIZER) else shown(file_of(str(name)))
    line = f"{what}, ids up to {tokenizer.vocab_size - 1:,}"
    if config.model.path is None:
        return line
    if is_own(config):
        return f"{line}; the checkpoint's own"
    own = own_tokenizer(Path(config.model.path))
    return f"{line}; the checkpoint brings {'none' if own is None else 'another, which is not used or saved'}"


def _special_tokens(model_config: Any, tokenizer: Tokenizer) -> str:
    roles = {"begin": "bos_token_id", "end": "eos_token_id", "pad": "pad_token_id"}
    ids = {role: getattr(model_config, key, None) for role, key in roles.items()}
    stated = ", ".join(f"{role} {'none' if value is None else value}" for role, value in ids.items())
    begins = "nothing" if tokenizer.begin_id is None else str(tokenizer.begin_id)
    return f"{begins} begins and {tokenizer.end_id} ends a document; the model's: {stated}"


def _template(config: Config) -> str:
    if config.data.tokenizer in (None, BYTE_TOKENIZER):
        return "none"
    chats = [source for source in config.data.named_sources if source.content == "messages"]
    use = "conversations go through it" if chats else "text is trained as it is"
    if any(source.chat_template is not None for source in chats):
        use = "conversations go through data.chat_template"
    own = config.model.path if is_own(config) else None
    directory = file_of(str(config.data.tokenizer)).parent if own is None else Path(own)
    if (directory / "chat_template.jinja").is_file() or _has_template(directory / "tokenizer_config.json"):
        return f"a chat template, saved with the model; {use}"
    return f"none of the tokenizer; {use}" if chats else "none"


def _has_template(path: Path) -> bool:
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _context(config: Config, model_config: Any) -> str:
    limit = getattr(model_config, "max_position_embeddings", None)
    line = f"{config.data.max_context:,} tokens, longer documents: {config.data.overlong}"
    return line if limit is None else f"{line}; the model's limit: {limit:,}"


def _devices(config: Config, world_size: int) -> str:
    return f"{counted(world_size, 'rank')} of one {'GPU' if config.train.device == 'cuda' else 'CPU process'} each"


def _layout(parallel: ParallelConfig, world_size: int) -> dict[str, str]:
    """What stands on which axis; nothing where all ranks are HDP ranks."""
    if parallel.pp_size == parallel.tp_size == 1:
        return {}
    hdp_size = world_size // (parallel.pp_size * parallel.tp_size)
    axes = {"pipeline stage": parallel.pp_size, "HDP rank": hdp_size, "TP rank": parallel.tp_size}
    return {"layout": " x ".join(counted(size, axis) for axis, size in axes.items())}


def _recomputation(config: Config) -> str:
    return "every layer recomputed" if config.train.activation_checkpointing == "full" else "activations kept"


def _saved(config: Config) -> str:
    if not config.run.save_model:
        return "not at all"
    return f"{shown(Path(config.run.dir) / 'model')}, {config.train.dtype}"
