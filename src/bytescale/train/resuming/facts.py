"""What a checkpoint says of the run that made it, and what of it a run that goes on may change.

The same model, data, seed, context and batch: with any of them changed the steps that follow are of another run, so
each is compared and refused by its name. Everything else may change: ranks, pipeline, strategy and capacity do not
change the numbers, learning rate and steps do; what changed is shown.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescale.config.schema import Config
from bytescale.config.toml import config_to_dict
from bytescale.errors import UserError
from bytescale.train.agreement import dataset_digest, versions
from bytescale.train.prepare import Prepared

_FIXED = ("batch.tokens", "batch.sequences", "data.max_context", "data.overlong", "train.seed")
_SHOWN = ("data", "parallel", "plan", "offload", "train")
_NOT_THE_MODEL = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"),
    *("use_cache", "tie_word_embeddings"),
)
"""Entries of a Hugging Face configuration that its weights do not depend on, or that the built model decides."""


def made_by(config: Config, prepared: Prepared, world_size: int) -> dict[str, Any]:
    """What produced a checkpoint, as JSON holds it."""
    facts = {
        "config": config_to_dict(config),
        "model": model_facts(prepared.model_config),
        "data": dataset_digest(prepared.dataset),
        "versions": versions(),
        "world_size": world_size,
    }
    return dict(json.loads(json.dumps(facts)))


def model_facts(model_config: Any) -> dict[str, Any]:
    """A Hugging Face configuration without what its weights do not depend on."""
    table: dict[str, Any] = json.loads(model_config.to_json_string(use_diff=False))
    return {key: value for key, value in table.items() if key not in _NOT_THE_MODEL}


def check_unchanged(stored: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on from `path` with another model, other data, another seed, context or batch.

    Raises:
        UserError: names what differs, with both values.
    """
    if stored["data"] != now["data"]:
        raise UserError(
            f"{path} was made with other data (digest of lengths and tokens {stored['data']}, now {now['data']}); give "
            "the data that the run began with, or start a new run"
        )
    before, after = _flat(stored), _flat(now)
    for key in (*_FIXED, *sorted(k for k in {*before, *after} if k.startswith("model config "))):
        if before.get(key) != after.get(key):
            raise UserError(
                f"{path} was made with {key} = {_show(before.get(key))}, now it is {_show(after.get(key))}; a run "
                "goes on with the same model, data, seed and batch, or is started anew"
            )


def changes(stored: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """What else differs, as `key before -> after`."""
    before, after = _flat(stored), _flat(now)
    keys = [k for k in {**after, **before} if k.split(".")[0] in ("ranks", *_SHOWN) and k not in _FIXED]
    keys = [key for key in keys if before.get(key) != after.get(key)]
    return tuple(f"{key} {_show(before.get(key))} -> {_show(after.get(key))}" for key in keys)


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"{section}.{key}": v for section, table in facts["config"].items() for key, v in table.items()}
    flat |= {f"model config {key}": value for key, value in facts["model"].items()}
    return {"ranks": facts["world_size"], **flat}


def _show(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
