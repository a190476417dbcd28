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
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from bytescale.config.overrides import Override
from bytescale.config.paths import absolute_path
from bytescale.config.quantities import EXAMPLES, parse_quantity
from bytescale.config.schema import Config
from bytescale.config.tokenizer import settle_tokenizer
from bytescale.errors import UserError, nearest
from bytescale.files import write_text_atomically

_EXCLUSIVE = {
    "model": ("preset", "path", "config"),
    "data": ("source", "sources"),
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


def config_to_dict(config: Config) -> dict[str, Any]:
    """`config` as nested TOML-ready tables; keys that are None are left out."""
    return {name: _table(section) for name, section in vars(config).items()}


def config_from_dict(table: dict[str, Any]) -> Config:
    """The configuration that `config_to_dict` turned into tables.

    Raises:
        UserError: a section, key or value is none of this version.
    """
    _check_names(table)
    return settle_tokenizer(
        Config(**{name: _build(cls, name, table.get(name, {})) for name, cls in _sections().items()})
    )


def write_config(config: Config, path: Path) -> None:
    """Store `config` as TOML, atomically."""
    write_text_atomically(path, tomli_w.dumps(config_to_dict(config)))


def _table(section: Any) -> dict[str, Any]:
    values = {_key(field.name): getattr(section, field.name) for field in dataclasses.fields(section)}
    kept = {key: value for key, value in values.items() if value is not None and value != ()}
    return {key: [*map(_plain, value)] if isinstance(value, tuple) else value for key, value in kept.items()}


def _plain(entry: Any) -> Any:
    return _table(entry) if dataclasses.is_dataclass(entry) else entry


def config_keys() -> list[str]:
    """Every `section.key` there is, in order of definition; a key of an array of tables only where it has no other."""
    keys = []
    for name, cls in _sections().items():
        own = _fields(cls)
        for key, field in own.items():
            keys.append(f"{name}.{key}")
            entry = _entry_class(get_type_hints(cls)[field.name])
            inner = _fields(entry) if entry is not None else ()
            keys += [f"{name}.{key}.{other}" for other in inner if other not in own]
    return keys


def _key(field_name: str) -> str:
    """The key of a field; one that is a word of Python ends in an underscore there."""
    return field_name.removesuffix("_")


def _fields(section_class: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a section by their keys."""
    return {_key(field.name): field for field in dataclasses.fields(section_class)}


def _sections() -> dict[str, Any]:
    return get_type_hints(Config)


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


def _check_key(section: str, key: str, cls: Any = None) -> None:
    known = _fields(cls or _sections()[section])
    if key in known:
        return
    elsewhere = [name for name in config_keys() if name.split(".")[-1] == key]
    hint = f"there is {elsewhere[0]}" if elsewhere else nearest(key, known)
    raise UserError(f"unknown key {section}.{key}; {hint}")


def _apply(table: dict[str, Any], override: Override) -> None:
    section, key, *inner = override.key
    if section not in _sections():
        raise UserError(f"unknown section in {override.option}; {nearest(section, _sections())}")
    _check_key(section, key)
    hint = get_type_hints(_sections()[section])[_fields(_sections()[section])[key].name]
    entry = _entry_class(hint)
    if inner and entry is not None:
        _apply_to_entry(table.get(section, {}).get(key), override, entry)
        return
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


def _apply_to_entry(entries: Any, override: Override, cls: Any) -> None:
    """Change one key of the table of an array that its name, `source-2` for the second, selects."""
    section, key, name, *inner = override.key
    kind = key.removesuffix("s")
    names = {}
    for number, entry in enumerate(entries if isinstance(entries, list) else (), start=1):
        if isinstance(entry, dict):
            names[str(entry.get("name", f"{kind}-{number}")).replace("-", "_")] = entry
    if name not in names:
        raise UserError(f"{override.option}: no {kind} is called {name}; {nearest(name, names)}")
    if len(inner) != 1:
        raise UserError(f"{override.option} does not name a key: write --{section}.{key}.{name}.weight value")
    _check_key(f"{section}.{key}", inner[0], cls)
    names[name][inner[0]] = _override_value(override, get_type_hints(cls)[inner[0]], free=False)


def _entry_class(hint: Any) -> Any:
    """The class of the tables of an array, `tuple[Entry, ...]`; None for any other hint."""
    entry = get_args(hint)[0] if get_origin(hint) is tuple else None
    return entry if dataclasses.is_dataclass(entry) else None


def _entries(name: str, value: Any, cls: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UserError(f"{name} must be tables of their own, each opened by [[{name}]], not {_show(value)}")
    built = []
    for number, entry in enumerate(value, start=1):
        try:
            for key in entry:
                _check_key(name, key, cls)
            built.append(_build(cls, name, entry))
        except UserError as error:
            raise UserError(f"[[{name}]] number {number}: {error}") from None
    return tuple(built)


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
    for key, field in _fields(cls).items():
        name, hint = f"{section}.{key}", hints[field.name]
        if key in table:
            values[field.name] = _value(name, table[key], hint, field.metadata)
        elif isinstance(field.default, str):
            # A default is read like any other text: `runs/default` is a path too.
            values[field.name] = _value(name, field.default, hint, field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            words = [word for word in get_args(hint) if isinstance(word, str)]
            raise UserError(f"{name} is missing" + f"; choose one of {', '.join(words)}" * bool(words))
    return cls(**values)


def _value(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    """What `value` means for the field `name`: a quantity as a number, a path made absolute, anything else as it is."""
    entry = _entry_class(hint)
    if entry is not None:
        return _entries(name, value, entry)
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
