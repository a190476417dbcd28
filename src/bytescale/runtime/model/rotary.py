"""How far a configuration's rotary positions reach, and which of its keys the angles depend on.

What Transformers does with `max_position_embeddings`, by rotary type: `default`, `linear` and `proportional` never read
it; `llama3` and `yarn` read `original_max_position_embeddings`, for which it is the fallback, and `yarn` divides the
two where `factor` is null; `dynamic` and `longrope` change their angles with the longest position present. Checkpoints
state in it either what was trained before the stretching or what is reached after it, so a stretched type reaches the
larger of it and (original context) * factor.
"""

from collections.abc import Iterator
from typing import Any

from bytescale.errors import UserError

POSITION_DEPENDENT = ("dynamic", "longrope")
"""Types whose angles depend on the longest position present; a piece of a sequence would get the wrong ones."""

_NEED_ORIGINAL = ("yarn", "llama3")
_STRETCHED = ("linear", "yarn", "llama3")
_ORIGINAL = "original_max_position_embeddings"


def sections(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration: one table, or one for each kind of layer; none without rotary ones."""
    return list(_sections(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)))


def _sections(parameters: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(parameters, dict) or not parameters:
        return
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    yield from nested or [parameters]


def kind_of(section: dict[str, Any]) -> str:
    """The rotary type of one table."""
    return str(section.get("rope_type") or section.get("type") or "default")


def check_original(values: dict[str, Any], default: Any) -> None:
    """Make sure that the original context of stretched angles is the one that the user stated.

    Left alone, Transformers takes it from `max_position_embeddings`, that is from the length of the data, or from the
    class although the table says otherwise.

    Args:
        values: a `[model.config]` table; changed in place.
        default: the configuration that the class gives without any key.

    Raises:
        UserError: a stretched type is asked for without the context that it stretches.
    """
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    for section in _sections(values.get(key)):
        if kind_of(section) not in _NEED_ORIGINAL:
            continue
        original = section.get(_ORIGINAL) or values.get(_ORIGINAL)
        if original is None:
            raise UserError(
                f"model.config.{key} asks for rotary type {kind_of(section)!r} without {_ORIGINAL}; "
                "state the context that its factor stretches"
            )
        if hasattr(default, _ORIGINAL):
            values[_ORIGINAL] = original  # such classes let it win over the table


def ignores_the_limit(config: Any) -> bool:
    """Whether `max_position_embeddings` takes no part in a model's function: every position comes from the angles."""
    tables = sections(config)
    return bool(tables) and all(
        kind_of(table) not in POSITION_DEPENDENT and (kind_of(table) != "yarn" or table.get("factor"))
        for table in tables
    )


def reach(config: Any) -> tuple[int | None, str]:
    """The longest sequence that the positions are made for, and the keys that say so; None without a limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None, ""
    found = [_reach(table, limit) for table in sections(config)]
    return min(found, default=(limit, f"max_position_embeddings = {limit}"))


def _reach(table: dict[str, Any], limit: int) -> tuple[int, str]:
    kind, factor = kind_of(table), table.get("factor")
    if kind in _STRETCHED and isinstance(factor, int | float):
        original = table.get(_ORIGINAL) or limit
        if (stretched := int(original * factor)) > limit:
            return stretched, f"rotary positions for {original} * {factor} tokens ({kind})"
    return limit, f"max_position_embeddings = {limit}"
