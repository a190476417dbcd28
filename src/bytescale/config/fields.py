"""How a key of the configuration is declared, and how its value is checked."""

from dataclasses import field
from typing import Any, get_args

from bytescale.config.quantities import Unit
from bytescale.errors import UserError


def path_field(default: Any = None, *, words: tuple[str, ...] = (), glob: bool = False) -> Any:
    """A field that holds a place in the file system, or one of `words`; with `glob` a pattern of places too."""
    return field(default=default, metadata={"path": True, "words": words, "glob": glob})


def unit_field(unit: Unit, default: Any = None) -> Any:
    """A field that may be written with a unit."""
    return field(default=default, metadata={"unit": unit})


def require(condition: bool, message: str) -> None:
    """Refuse with `message` where `condition` is not met."""
    if not condition:
        raise UserError(message)


def require_at_least(key: str, value: float | None, least: int) -> None:
    """Refuse a value of `key` below `least`; None is no value."""
    require(value is None or value >= least, f"{key} = {value}; it must be at least {least}")


def require_choice(key: str, value: str, choices: Any) -> None:
    """Refuse a value of `key` that is none of those of the literal type `choices`."""
    known = get_args(choices)
    require(value in known, f"{key} = {value!r} is unknown; choose one of {', '.join(known)}")
