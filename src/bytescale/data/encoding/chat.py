"""Conversations to tokens and masks, through the tokenizer's own chat template.

Templates are rendered by Transformers, in its sandbox; the text is encoded without any token added, as its
`apply_chat_template` does. Where a template marks the assistant's turns (`{% generation %}`) the mask is those marks.
Otherwise turn i is found by rendering prefixes:

    begin = len(P), P = messages before i, with the generation prompt      checked: the whole text begins with P
    end   = where the turn ends that follows P when the conversation ends with message i

which may have lost what the template drops from earlier turns, such as reasoning, but nothing of the answer; white
space behind its last special token is the template's, not the assistant's. Invariant: a template of which this does not
hold is refused, never guessed at. A token counts as the assistant's if any character of it is.

Cost: two renderings an answer without marks, one with.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.config.data import DocumentsConfig
from bytescale.data.optional import one_line, require
from bytescale.data.sources.content import Chat, TokenIds
from bytescale.data.tokenizers import FileTokenizer, Tokenizer
from bytescale.errors import UserError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING_END = "</think>"
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template and the tokenizer it belongs to.

    Attributes:
        name: where it comes from.
        text: the template.
        tokens: `bos_token` and the like, by name, for the template.
        added_tokens: texts of the tokens that are no part of a text.
        library: encodes the rendered text.
        only_assistant: whether only the assistant's tokens are targets.
    """

    name: str
    text: str
    tokens: dict[str, str]
    added_tokens: tuple[str, ...]
    library: Any = field(repr=False)
    only_assistant: bool = True

    @property
    def fingerprint(self) -> str:
        """Digest of everything besides the tokenizer that decides ids and mask."""
        parts = json.dumps([self.text, sorted(self.tokens.items()), self.only_assistant])
        return hashlib.blake2b(parts.encode(), digest_size=20).hexdigest()

    def encode(self, chats: Sequence[tuple[str, Chat]]) -> list[TokenIds | UserError]:
        """Tokens and mask of each of some named conversations; an error in place of one that has none."""
        rendered = [self._rendered(name, chat) for name, chat in chats]
        texts = [text for text, _ in (r for r in rendered if not isinstance(r, UserError))]
        encoded = iter(self.library.encode_batch(texts, add_special_tokens=False))
        result: list[TokenIds | UserError] = []
        for (name, _), item in zip(chats, rendered, strict=True):
            if isinstance(item, UserError):
                result.append(item)
                continue
            of_item = next(encoded)
            ids = np.asarray(of_item.ids, dtype=np.uint32)
            if item[1] is None:
                result.append(TokenIds(ids))
                continue
            mask = _mask(of_item.offsets, item[1])
            no_answer = UserError(f"{name}: the conversation has no answer: no token of it is the assistant's")
            result.append(TokenIds(ids, mask) if mask.any() else no_answer)
        return result

    def _rendered(self, name: str, chat: Chat) -> tuple[str, list[Span] | None] | UserError:
        """The text of a conversation and where the assistant speaks; None where everything is a target."""
        try:
            if not self.only_assistant:
                return self._render(chat)[0], None
            if _MARK.search(self.text):
                return self._render(chat, return_assistant_tokens_mask=True)
            return self._by_prefixes(chat)
        except UserError as error:
            return UserError(f"{name}: {error}")

    def _render(self, chat: Chat, num_messages: int | None = None, **options: Any) -> tuple[str, list[Span]]:
        utilities = require("transformers.utils.chat_template_utils", "train", 'data.content = "messages"')
        try:
            texts, spans = utilities.render_jinja_template(
                [list(chat.messages[:num_messages])],
                tools=None if chat.tools is None else list(chat.tools),
                chat_template=self.text,
                **options,
                **self.tokens,
            )
        except ImportError as error:
            raise UserError(f"a chat template needs jinja2: {one_line(error)}") from None
        except Exception as error:  # A template raises whatever it likes for a conversation that it does not know.
            raise UserError(f"the chat template {self.name} refuses it: {one_line(error)}") from None
        return texts[0], spans[0] if spans else []

    def _by_prefixes(self, chat: Chat) -> tuple[str, list[Span]]:
        text, spans = self._render(chat)[0], []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = self._render(chat, number, add_generation_prompt=True)[0]
            ending = self._render(chat, number + 1)[0]
            alone = ending[len(before) :]
            if not (text.startswith(before) and ending.startswith(before)):
                turn = None
            elif number + 1 == len(chat.messages):
                # A template may close a conversation with more than it closes a turn with.
                stable = _stable(alone, self._continued(chat, before), _answer(message), self.added_tokens)
                turn = alone if stable is None else alone[: stable[1]]
            else:
                stable = _stable(alone, text[len(before) :], _answer(message), self.added_tokens)
                turn = None if stable is None else alone[slice(*stable)]
            if turn is None:
                raise UserError(
                    f"the chat template {self.name} does not let message {number + 1} be found, its text changes with "
                    "what follows; mark it with {% generation %} and {% endgeneration %}, or set data.loss"
                )
            trimmed = turn.rstrip()
            turn = trimmed if trimmed.endswith(self.added_tokens) else turn
            spans.append((len(before), len(before) + len(turn)))
        return text, spans

    def _continued(self, chat: Chat, before: str) -> str:
        """What would follow `before` if the user spoke once more after the last message; empty where nobody knows."""
        try:
            text = self._render(replace(chat, messages=(*chat.messages, {"role": "user", "content": "."})))[0]
        except UserError:
            return ""
        return text[len(before) :] if text.startswith(before) else ""


def _stable(alone: str, rest: str, answer: str, closings: Sequence[str]) -> Span | None:
    """Which part of the turn `alone`, which ends a conversation, is there too when it goes on as `rest`.

    What comes before the answer may be dropped then; of the answer and its closing nothing may be.
    """
    last = alone.rfind(answer) if answer else 0
    for begin in range(last + 1):
        common = _common_prefix(alone[begin:], rest)
        if common == alone[begin:]:
            return begin, len(alone)
        answered = last - begin + len(answer)
        if answer and len(common) >= answered:
            ends = [place + len(token) for token in closings if (place := common.rfind(token, answered)) >= 0]
            return (begin, begin + max(ends)) if ends else None
    return None


def _common_prefix(text: str, other: str) -> str:
    same = (a == b for a, b in zip(text, other, strict=False))
    return text[: next((place for place, equal in enumerate(same) if not equal), min(len(text), len(other)))]


def _answer(message: dict[str, Any]) -> str:
    """The text of a message that no template drops: what follows its reasoning."""
    content = message.get("content")
    return content.rpartition(_REASONING_END)[2].strip() if isinstance(content, str) else ""


def _mask(offsets: Iterable[Span], spans: Sequence[Span]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """1 for each token that overlaps a span; both in order."""
    starts, ends = np.array(list(offsets), dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=np.uint8)
    for begin, end in spans:
        mask |= ((starts < end) & (ends > begin)).astype(np.uint8)
    return mask


def load_template(config: DocumentsConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a source: the file that it names, else that of the tokenizer.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError('data.content = "messages" needs a tokenizer file with a chat template; set data.tokenizer')
    beside = Path(tokenizer.name)
    settings = _settings(beside.with_name("tokenizer_config.json"))
    name, text = _template_of(config, beside, settings)
    require("jinja2", "train", "a chat template").Environment()
    tokens = {}
    for key, value in (_settings(beside.with_name("special_tokens_map.json")) | settings).items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    added = tuple(token.content for token in tokenizer.library.get_added_tokens_decoder().values())
    return ChatTemplate(name, text, tokens, added, tokenizer.library, config.loss == "assistant")


def _template_of(config: DocumentsConfig, tokenizer: Path, settings: dict[str, Any]) -> tuple[str, str]:
    if config.chat_template is not None:
        return config.chat_template, _text(Path(config.chat_template), "data.chat_template")
    path = tokenizer.with_name("chat_template.jinja")
    if path.is_file():
        return str(path), _text(path, "the chat template")
    stated = settings.get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
    if isinstance(stated, str):
        return f"of {tokenizer.parent.name}", stated
    raise UserError(f"{tokenizer} has no chat template beside it; set data.chat_template to a file of one")


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} {path}: {one_line(error)}") from None


def _settings(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from None
    return value if isinstance(value, dict) else {}
