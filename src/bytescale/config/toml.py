"""From TOML and command-line overrides to a typed `Config`, and back.

The classes in `bytescale.config.schema` are the only list of keys there is: this module reads their fields and types,
so a new key needs no change here. Every complaint is one line that names the key, what it expects and what it was
given; an unknown key names the nearest known one. An integer is accepted where a number is expected, never the reverse.
Sizes and times may carry a unit (`bytescale.config.quantities`).

Paths are interpreted here and nowhere else: `~` is expanded, relative ones count from the working directory, and what a
`Config` holds is absolute, so that the stored configuration means the same files wherever it is read.

Keys that exclude each other (`model.preset`, `path`, `config`; `batch.tokens`, `sequences`): an override of one takes
the place of what the file chose, and the last override wins. `write_config` stores the resolved configuration; reading
that file again gives an equal `Config`.
"""

import dataclasses
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from bytescale.config.paths import absolute_path
from bytescale.config.quantities import EXAMPLES, parse_quantity
from bytescale.config.schema import Config
from bytescale.config.tokenizer import settle_tokenizer
from bytescale.errors import UserError, nearest
from bytescale.files import write_text_atomically

_EXCLUSIVE = {
    "model": ("preset", "path", "config"),
    "batch": ("tokens", "sequences"),
    "eval": ("tokens", "sequences"),
}
_INTEGER_LIMIT = 1 << 63
_EXPECTED = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
    tuple: "a list of words",
}


@dataclasses.dataclass(frozen=True)
class Override:
    """One `--section.key value` of the command line.

    Attributes:
        key: the path, e.g. ("model", "config", "hidden_size").
        text: the value as typed; None when the option stood alone, which means true for a switch.
    """

    key: tuple[str, ...]
    text: str | None

    @property
    def option(self) -> str:
        return "--" + ".".join(self.key)


def load_config(path: Path, overrides: Sequence[Override] = ()) -> Config:
    """Read `path`, apply `overrides` in their order, check everything.

    Raises:
        UserError: the file cannot be read, is not TOML, or a section, key, type or value is wrong.
    """
    table = _read_toml(path)
    touched = {override.key[0] for override in overrides}
    try:
        _check_names(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for override in overrides:
        _apply(table, override)
    sections = {}
    for name, section_class in _sections().items():
        try:
            sections[name] = _build(section_class, name, table.get(name, {}))
        except UserError as error:
            raise error if name in touched else UserError(f"{path}: {error}") from None
    return settle_tokenizer(Config(**sections))


def parse_overrides(arguments: Sequence[str], options: Sequence[str] = ()) -> tuple[list[Override], list[str]]:
    """Split command-line words into overrides and the rest.

    `--section.key value` and `--section.key=value`, hyphens and underscores alike. The rest is returned in order.

    Args:
        arguments: the words.
        options: other options of the command, to point to from a misspelt one.

    Raises:
        UserError: an option without a dot, or a word that is not valid text.
    """
    overrides: list[Override] = []
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            rest.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        key = tuple(part.replace("-", "_") for part in name.split("."))
        if len(key) < 2 or not all(key):
            close = f"{nearest(f'--{name}', options)}; " if get_close_matches(f"--{name}", options) else ""
            raise UserError(f"unknown option --{name}; {close}a configuration key is written --section.key value")
        text = value if equals else words.pop(0) if words and not _is_option(words[0]) else None
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise UserError(f"--{name}: the value is not valid UTF-8") from None
        overrides.append(Override(key, text))
    return overrides, rest


def config_to_dict(config: Config) -> dict[str, Any]:
    """`config` as nested TOML-ready tables; keys that are None are left out."""
    sections = dataclasses.asdict(config)
    return {name: {k: v for k, v in keys.items() if v is not None} for name, keys in sections.items()}


def write_config(config: Config, path: Path) -> None:
    """Store `config` as TOML, atomically."""
    write_text_atomically(path, tomli_w.dumps(config_to_dict(config)))


def config_keys() -> list[str]:
    """Every `section.key` there is, in order of definition."""
    return [f"{name}.{field.name}" for name, cls in _sections().items() for field in dataclasses.fields(cls)]


def _sections() -> dict[str, Any]:
    return get_type_hints(Config)


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2 and not word[2].isdigit()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = " ".join(str(error).split())
        where = where.replace("(at end of document)", f"(at the end, line {max(1, len(text.splitlines()))})")
        raise UserError(f"{path} is not valid TOML: {where}") from None


def _check_names(table: dict[str, Any]) -> None:
    sections = _sections()
    for name, section in table.items():
        if name not in sections:
            raise UserError(f"unknown section [{name}]; {nearest(name, sections)}")
        if not isinstance(section, dict):
            raise UserError(f"{name} is a section of its own: write [{name}], not {name} = {_show(section)}")
        for key in section:
            _check_key(name, key)


def _check_key(section: str, key: str) -> None:
    known = [field.name for field in dataclasses.fields(_sections()[section])]
    if key in known:
        return
    elsewhere = [name for name in config_keys() if name.split(".")[1] == key]
    hint = f"there is {elsewhere[0]}" if elsewhere else nearest(key, known)
    raise UserError(f"unknown key {section}.{key}; {hint}")


def _apply(table: dict[str, Any], override: Override) -> None:
    section, key, *inner = override.key
    if section not in _sections():
        raise UserError(f"unknown section in {override.option}; {nearest(section, _sections())}")
    _check_key(section, key)
    hint = get_type_hints(_sections()[section])[key]
    if inner and dict not in _choices(hint):
        raise UserError(f"{override.option}: {section}.{key} is not a table")
    target = table.setdefault(section, {})
    if key in _EXCLUSIVE.get(section, ()):
        for other in _EXCLUSIVE[section]:
            if other != key:
                target.pop(other, None)
    for name in (key, *inner)[:-1]:
        if not isinstance(target.setdefault(name, {}), dict):
            raise UserError(f"{override.option}: {name} is not a table but {_show(target[name])}")
        target = target[name]
    target[override.key[-1]] = _override_value(override, dict[str, Any] if inner else hint, bool(inner))


def _override_value(override: Override, hint: Any, free: bool) -> Any:
    """The value of an override: a TOML literal where it is one, the text itself where a string is wanted or left."""
    choices = _choices(hint)
    text = override.text
    if text is None:
        if free or bool in choices:
            return True
        raise UserError(f"{override.option} needs a value: {_expected(choices)}")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    fits = type(value) in choices or (float in choices and _is_number(value))
    return text if str in choices and not free and not fits else value


def _build(cls: Any, section: str, table: dict[str, Any]) -> Any:
    hints = get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        name, hint = f"{section}.{field.name}", hints[field.name]
        if field.name in table:
            values[field.name] = _value(name, table[field.name], hint, field.metadata)
        elif isinstance(field.default, str):
            # A default is read like any other text: `runs/default` is a path too.
            values[field.name] = _value(name, field.default, hint, field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            words = [word for word in get_args(hint) if isinstance(word, str)]
            raise UserError(f"{name} is missing" + f"; choose one of {', '.join(words)}" * bool(words))
    return cls(**values)


def _value(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    """What `value` means for the field `name`: a quantity as a number, a path made absolute, anything else as it is."""
    unit = metadata.get("unit")
    if unit is not None and isinstance(value, str):
        quantity = parse_quantity(value, unit)
        if quantity is None:
            raise UserError(f"{name} must be {EXAMPLES[unit]}, not {_show(value)}")
        value = quantity
    value = _coerce(name, value, hint)
    if metadata.get("path") and value not in metadata["words"]:
        value = absolute_path(name, value, glob=metadata["glob"])
    return value


def _choices(hint: Any) -> tuple[type, ...]:
    """The plain types a hint allows: `str | float` gives (str, float), a Literal of words gives (str,)."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(choice for part in get_args(hint) for choice in _choices(part))
    if get_origin(hint) is Literal:
        return (str,)
    if hint is type(None):
        return ()
    return (get_origin(hint) or hint,)


def _coerce(name: str, value: Any, hint: Any) -> Any:
    choices = _choices(hint)
    if tuple in choices:
        return _words(name, value)
    if type(value) is int and not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise UserError(f"{name} = {value} does not fit in 64 bits")
    if isinstance(value, str) and (not value or "\0" in value):
        # Every string here is a name, a path or a choice; an empty path would mean the working directory.
        raise UserError(f"{name} holds a null character" if value else f"{name} is empty; leave it out or give a value")
    if type(value) in choices and not (isinstance(value, float) and not math.isfinite(value)):
        return value
    if float in choices and type(value) is int:
        return float(value)
    raise UserError(f"{name} must be {_expected(choices)}, not {_show(value)}")


def _words(name: str, value: Any) -> tuple[str, ...]:
    """A list of words; one word, or several with commas between, will do for a list."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{name} must be {_EXPECTED[tuple]}, not {_show(value)}")
    return tuple(_coerce(name, word.strip(), str) for word in words)


def _expected(choices: tuple[type, ...]) -> str:
    return " or ".join(_EXPECTED[choice] for choice in choices)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    kinds = {str: "the string ", int: "the integer ", float: "the number "}
    text = tomli_w.dumps({"v": value}).partition("=")[2].strip()
    return kinds.get(type(value), "") + (text if len(text) <= 60 else f"{text[:57]}...")
