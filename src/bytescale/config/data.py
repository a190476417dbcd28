"""The `[data]` section: where documents lie, what is read of them, and how sources are mixed.

One source stands in `[data]` itself, several stand in `[[data.sources]]`; the keys of a source are the same in both.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from bytescale.config.fields import path_field, require, require_at_least, require_choice, unit_field

Source = Literal["text-tree", "jsonl", "parquet", "arrow", "megatron", "python-stdlib"]
Content = Literal["text", "messages", "tokens"]
LossOn = Literal["assistant", "all"]
OnError = Literal["stop", "skip"]
Overlong = Literal["split", "drop", "error"]
SplitAt = Literal["token", "line", "paragraph"]
Mix = Literal["tokens", "sequences"]

BYTE_TOKENIZER = "byte"
"""The one tokenizer that is no file."""


@dataclass(frozen=True)
class DocumentsConfig:
    """Where the documents of one source lie, and what is read of them."""

    source: Source | None = None
    """`text-tree` (a directory of text files), `jsonl`, `parquet`, `arrow` (files, or a directory that `datasets`
    saved), `megatron` (`.bin` and `.idx`), or `python-stdlib` (the `.py` files of the running interpreter)"""

    path: str | None = path_field(glob=True)
    """directory, file or glob; not needed by `python-stdlib`"""

    glob: str = "**/*"
    """which files of a `text-tree` are read"""

    text_field: str = "text"
    """key or column that holds the text; `a.b` is `b` inside `a`"""

    content: Content = "text"
    """what a record of `jsonl`, `parquet` or `arrow` is: `text`; `messages`, a conversation, put into text by the chat
    template; `tokens`, ids that were made elsewhere and are taken as they stand"""

    messages_field: str = "messages"
    """key or column that holds the messages, each with `role` and `content`, or `from` and `value`"""

    loss: LossOn = "assistant"
    """which tokens of a conversation are targets: the `assistant`'s, or `all`"""

    chat_template: str | None = path_field()
    """file of a chat template in place of the tokenizer's own"""

    tokens_field: str = "input_ids"
    """key or column that holds the token ids"""

    labels_field: str = "labels"
    """key or column, where a record has it, that repeats the ids and is -100 where a token is no target"""

    mask_field: str = "loss_mask"
    """key or column, where a record has it and no labels, that is 0 where a token is no target"""

    @property
    def wanted_fields(self) -> tuple[str, ...]:
        """What is read of a record; the first has to be there."""
        if self.content == "messages":
            return self.messages_field, "tools"
        if self.content == "tokens":
            return self.tokens_field, self.labels_field, self.mask_field
        return (self.text_field,)

    @property
    def is_masked(self) -> bool:
        """Whether some tokens of the documents may be no targets."""
        return self.content == "tokens" or (self.content == "messages" and self.loss == "assistant")

    def _check(self, section: str) -> None:
        source = self.source
        require(source is not None, f"{section}.source is missing; choose one of {', '.join(_words(Source))}")
        assert source is not None
        require_choice(f"{section}.source", source, Source)
        require_choice(f"{section}.content", self.content, Content)
        require_choice(f"{section}.loss", self.loss, LossOn)
        require(
            self.content == "text" or source in ("jsonl", "parquet", "arrow"),
            f'{section}.content = "{self.content}" needs records: {section}.source jsonl, parquet or arrow',
        )
        require(
            source == "python-stdlib" or self.path is not None, f'{section}.source = "{source}" needs {section}.path'
        )


@dataclass(frozen=True)
class SourceConfig(DocumentsConfig):
    """One of several sources: the keys of a source in `[data]`, and these."""

    name: str | None = None
    """what messages and metrics call the source; `source-1`, `source-2`, ... by default"""

    weight: float = 1.0
    """how much of the mixture it is, relative to the weights of the others; 0 leaves it out"""

    epochs: int | None = None
    """most times that a run goes through it; the other sources then share what it leaves. A run ends when all have
    reached theirs"""

    def __post_init__(self) -> None:
        self._check("data.sources")
        require(
            math.isfinite(self.weight) and self.weight >= 0,
            f"data.sources.weight = {self.weight}; it must be at least 0",
        )
        require_at_least("data.sources.epochs", self.epochs, 1)


@dataclass(frozen=True)
class DataConfig(DocumentsConfig):
    """Where sequences come from."""

    sources: tuple[SourceConfig, ...] = ()
    """several sources, mixed by weight, each a table `[[data.sources]]`; in place of `source` and its keys here"""

    mix: Mix = "tokens"
    """what the weights of several sources are shares of: `tokens` or `sequences`"""

    tokenizer: str | None = path_field(words=(BYTE_TOKENIZER,))
    """`byte` (ids 0-255 are the bytes, 256 ends a document), a `tokenizer.json` file or a directory with one. Left out,
    a checkpoint uses its own and a fresh model `byte`"""

    end_token: str | None = None
    """token that ends a document, for `tokenizer.json` files"""

    begin_token: str | int | bool = False
    """token that opens every document, for `tokenizer.json` files: `true` for the one that the file itself puts in
    front of a text, or a token, or its id"""

    max_context: int = unit_field("tokens", 8192)
    """longest sequence, in tokens"""

    overlong: Overlong = "split"
    """longer documents: `split`, `drop` or `error`; counted and shown"""

    split_at: SplitAt = "token"
    """where `split` cuts: every `max_context` tokens (`token`), or behind the last `paragraph` or `line` in the second
    half of them, where there is one"""

    validation: float = 0.0
    """share of the documents that is never trained on, chosen by their contents alone: the same ones whatever the seed,
    the order and the tokenizer, equal documents together"""

    on_error: OnError = "stop"
    """a document that cannot be read or holds nothing of what was asked for: `stop`, or `skip` it and count it"""

    workers: int | None = None
    """processes that tokenise, one core each; by default none but the run's own, with the threads of the tokenizer"""

    cache_dir: str | None = path_field()
    """directory of tokenised data, shared by the ranks of a node"""

    def __post_init__(self) -> None:
        if self.sources:
            self._check_sources()
        else:
            self._check("data")
        require_choice("data.mix", self.mix, Mix)
        require_choice("data.on_error", self.on_error, OnError)
        require_at_least("data.workers", self.workers, 1)
        require_choice("data.overlong", self.overlong, Overlong)
        require_choice("data.split_at", self.split_at, SplitAt)
        require_at_least("data.max_context", self.max_context, 2)
        require(0 <= self.validation < 1, f"data.validation = {self.validation}; a share lies in 0..1, below 1")

    def _check_sources(self) -> None:
        for key in fields(DocumentsConfig):
            require(
                getattr(self, key.name) == key.default,
                f"data.{key.name} is of one source, but there are [[data.sources]]; write it in each of them",
            )
        names = [source.name for source in self.named_sources]
        twice = [name for name in names if names.count(name) > 1]
        require(not twice, f'two [[data.sources]] are called "{(twice or [""])[0]}"; give each a name of its own')
        require(
            any(source.weight > 0 for source in self.sources),
            "the weights of the [[data.sources]] add up to 0; give at least one a weight above 0",
        )

    @property
    def named_sources(self) -> tuple[SourceConfig, ...]:
        """Every source, with its name; the one of `[data]` itself has the empty name."""
        if self.sources:
            return tuple(
                SourceConfig(**_values(source) | {"name": source.name or f"source-{number}"})
                for number, source in enumerate(self.sources, start=1)
            )
        return (SourceConfig(**{key.name: getattr(self, key.name) for key in fields(DocumentsConfig)}, name=""),)


def _values(config: Any) -> dict[str, Any]:
    return {key.name: getattr(config, key.name) for key in fields(config)}


def _words(choices: Any) -> tuple[str, ...]:
    return tuple(choices.__args__)
