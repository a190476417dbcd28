"""`--section.key value` on the command line, as words: what they say, not what they mean.

`bytescale.config.toml` applies them to what the file says and knows which keys there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from bytescale.errors import UserError, nearest


@dataclass(frozen=True)
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


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2 and not word[2].isdigit()
