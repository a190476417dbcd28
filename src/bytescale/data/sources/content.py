"""What one record of a file holds: text, token ids or a conversation; or words for what it holds instead.

A record is a JSON object or a row of a table, as a dictionary. Fields may lie deeper: a name with dots is a path of
keys. Invariant: a record without the content that was asked for is an error that says what is there and which key to
set, never a silent gap; an empty or null text is an empty document.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.config.data import DocumentsConfig
from bytescale.errors import UserError, nearest

IdArray = npt.NDArray[np.uint32]
MaskArray = npt.NDArray[np.uint8]

CHAT, TOKEN_IDS, BYTES = "a chat (a list of messages)", "token ids (a list of integers)", "bytes"
_KEYS_OF = {CHAT: ("messages", "messages_field"), TOKEN_IDS: ("tokens", "tokens_field")}
MESSAGE_KEYS = frozenset({"role", "from", "content", "value"})
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Tokens that were made elsewhere. `mask` is 1 where a token is a target; None is everywhere."""

    ids: IdArray
    mask: MaskArray | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation: messages with role and content, and the tools they were given."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class Document:
    """One record. `name` says where it came from: a relative path, or file:line."""

    name: str
    content: str | TokenIds | Chat

    @property
    def raw(self) -> bytes:
        """The contents as bytes, for a digest that does not depend on the tokenizer."""
        if isinstance(self.content, str):
            return self.content.encode()
        if isinstance(self.content, TokenIds):
            return self.content.ids.astype("<u4").tobytes()
        return json.dumps([self.content.messages, self.content.tools], sort_keys=True).encode()


def content_of(record: dict[str, Any], place: str, config: DocumentsConfig) -> str | TokenIds | Chat:
    """What `record` holds, as `config.content` asks.

    Raises:
        UserError: it holds something else; names `place`, what is there and the key to set.
    """
    if config.content == "messages":
        return _chat(record, place, config)
    if config.content == "tokens":
        return _token_ids(record, place, config)
    found, text = value_of(record, config.text_field)
    if found and text is None:
        return ""
    if not isinstance(text, str):
        raise no_text(place, config.text_field, kind_of(text) if found else None, dict(fields_of(record, kind_of)))
    return text


def value_of(record: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Whether `record` has `field`, a key or a path of keys with dots between, and its value; null has every key."""
    if field in record:
        return True, record[field]
    head, _, rest = field.partition(".")
    inner = record.get(head, "")
    if rest and inner is None:
        return True, None
    return value_of(inner, rest) if rest and isinstance(inner, dict) else (False, None)


def fields_of(record: dict[str, Any], kind: Callable[[Any], str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and kind of every value in `record` that is no object, the names of inner ones with dots between."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from fields_of(value, kind, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", kind(value)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, list) and value:
        if all(type(entry) is int for entry in value):
            return TOKEN_IDS
        return CHAT if all(isinstance(entry, dict) and MESSAGE_KEYS & entry.keys() for entry in value) else "a list"
    kinds = {str: "text", list: "an empty list", dict: "an object", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def no_text(place: str, text_field: str, held: str | None, fields: dict[str, str]) -> UserError:
    """The refusal of a record or table whose `text_field` is `held`, or that lacks it; `fields` is what there is."""
    problem = f'{place} has no "{text_field}"' if held is None else f'{place}: "{text_field}" holds {held}, not text'
    texts = [name for name, kind in fields.items() if kind == "text"]
    asked = {text_field: held} if held is not None else fields
    name, kind = next(((name, kind) for name, kind in asked.items() if kind in _KEYS_OF), ("", ""))
    if kind:
        what = "" if held is not None else f'; "{name}" holds {kind}'
        content, key = _KEYS_OF[kind]
        field = "" if name == getattr(DocumentsConfig, key) else f' and data.{key} = "{name}"'
        return UserError(f'{problem}{what}: set data.content = "{content}"{field}')
    if BYTES in asked.values():
        return UserError(f"{problem}: bytes are not read, only text is")
    if held == "an object":
        texts = [name for name in texts if name.startswith(f"{text_field}.")] or texts
    if not texts:
        return UserError(f"{problem}, and nothing else there is text")
    return UserError(f"{problem}; set data.text_field ({nearest(text_field, texts)})")


def _wanted(record: dict[str, Any], place: str, key: str, field: str) -> Any:
    """The list that `field` of the record holds."""
    found, value = value_of(record, field)
    if not found:
        known = [name for name, _ in fields_of(record, kind_of)]
        raise UserError(f'{place} has no "{field}"; set data.{key} ({nearest(field, known)})')
    return value


def _token_ids(record: dict[str, Any], place: str, config: DocumentsConfig) -> TokenIds:
    values = _wanted(record, place, "tokens_field", config.tokens_field)
    ids = integers(values, place, config.tokens_field, least=0).astype(np.uint32)
    for key in ("labels_field", "mask_field"):
        field = getattr(config, key)
        found, values = value_of(record, field)
        if not found or values is None:
            continue
        column = integers(values, place, field, least=-100)
        if len(column) != len(ids):
            raise UserError(f'{place}: "{field}" has {len(column)} entries, "{config.tokens_field}" has {len(ids)}')
        if key == "mask_field":
            return TokenIds(ids, (column != 0).astype(np.uint8))
        mask = column != -100
        if (column[mask] != ids[mask]).any():
            first = int(np.flatnonzero(mask & (column != ids))[0])
            raise UserError(
                f'{place}: "{field}" is {column[first]} at {first}, "{config.tokens_field}" is {ids[first]}; '
                "labels are the token of the same place, or -100"
            )
        return TokenIds(ids, mask.astype(np.uint8))
    return TokenIds(ids)


def integers(values: Any, place: str, field: str, least: int) -> npt.NDArray[np.int64]:
    """A list of integers from `least` to 2^32 - 1 as an array; null is an empty one.

    Raises:
        UserError: it is something else.
    """
    if isinstance(values, list | type(None)):
        entries = values or []
        wrong = next((entry for entry in entries if type(entry) not in (int, bool)), None)
        if wrong is not None:
            raise UserError(f'{place}: "{field}" holds {kind_of(wrong)} among its entries, not only integers')
        try:
            array = np.array(entries, dtype=np.int64)
        except OverflowError:
            raise UserError(f'{place}: "{field}" holds a number that no token has') from None
    elif isinstance(values, np.ndarray):
        array = values.astype(np.int64)
    else:
        raise UserError(f'{place}: "{field}" holds {kind_of(values)}, not a list of integers')
    if len(array) and not (least <= int(array.min()) and int(array.max()) < 1 << 32):
        raise UserError(f'{place}: "{field}" holds {array.min() if array.min() < least else array.max()}, no token')
    return array


def _chat(record: dict[str, Any], place: str, config: DocumentsConfig) -> Chat:
    values = _wanted(record, place, "messages_field", config.messages_field)
    if not isinstance(values, list) or not all(isinstance(entry, dict) for entry in values):
        raise UserError(f'{place}: "{config.messages_field}" holds {kind_of(values)}, not a list of messages')
    messages = tuple(_message(entry, f"{place}: message {number}") for number, entry in enumerate(values, start=1))
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{place}: the conversation has no answer: none of its messages is the assistant's")
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f'{place}: "tools" holds {kind_of(tools)}, not a list of objects')
    return Chat(messages, tuple(_without_null(tools)) if tools else None)


def _message(entry: dict[str, Any], place: str) -> dict[str, Any]:
    """A message with `role` and `content`; `from` and `value` are other names for them."""
    message: dict[str, Any] = _without_null(entry)
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": _SHAREGPT_ROLES.get(role, role), "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise UserError(f'{place} has no "role"')
    content = message.get("content")
    calls = "tool_calls" in message
    if not isinstance(content, str | list) and not (content is None and calls):
        raise UserError(f'{place}: "content" holds {kind_of(content)}, not text')
    return message


def _without_null(value: Any) -> Any:
    """`value` without the nulls that a table puts where a record had no such key."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value
