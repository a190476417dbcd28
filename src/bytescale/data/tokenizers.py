"""From text to token ids: the built-in byte tokenizer, and any `tokenizer.json` file.

Both end every document with one end token. A file may open it with one begin token where `data.begin_token` says so;
nothing else is added: no template, no padding and no truncation, whatever the file asks for. Text is never stripped.
`fingerprint` changes whenever the ids of some text could change; it is part of the key of the token cache. Tokens of a
batch of documents come as one flat array plus lengths, so that no Python object per token exists.

Cost: the byte tokenizer is vectorised over the batch; files run in the `tokenizers` library, on its own threads.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray
from bytescale.config.data import BYTE_TOKENIZER, DataConfig
from bytescale.config.tokenizer import file_of
from bytescale.data.optional import one_line, require
from bytescale.errors import UserError

TokenArray = npt.NDArray[Any]
"""Token ids in some unsigned integer type."""

BYTE_END = 256
COMMON_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def vocab_size(self) -> int:
        """1 + the largest id."""

    @property
    def end_id(self) -> int:
        """Id that ends every document."""

    @property
    def begin_id(self) -> int | None:
        """Id that opens every document; None without one."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for whoever started the run."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of everything that decides the ids."""

    def encode(self, texts: Sequence[str]) -> tuple[TokenArray, IntArray]:
        """Tokens of all texts, each after the begin token, if there is one, and followed by the end token.

        Returns:
            tokens: all documents one after the other. Shape [sum(lengths)].
            lengths: tokens of each document, begin and end token included. Shape [len(texts)].

        Raises:
            UserError: some text has no tokens in this vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones by their names; what is no whole character becomes U+FFFD."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text, 256 ends a document."""

    name: str = "byte"
    vocab_size: int = BYTE_END + 1
    end_id: int = BYTE_END
    fingerprint: str = "byte"
    begin_id: None = None
    notes: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str]) -> tuple[TokenArray, IntArray]:
        """See `Tokenizer.encode`."""
        encoded = [text.encode("utf-8") for text in texts]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) + 1
        # One byte of room after each document, overwritten by the end token.
        tokens = np.frombuffer(b"\0".join([*encoded, b""]), dtype=np.uint8).astype(np.uint16)
        tokens[np.cumsum(lengths) - 1] = BYTE_END
        return tokens, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`; the end token is `<end>`."""
        parts = (bytes([token]) if token < BYTE_END else b"<end>" for token in ids)
        return b"".join(parts).decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class FileTokenizer:
    """A `tokenizer.json` run by the `tokenizers` library (`library` is its Tokenizer object)."""

    name: str
    vocab_size: int
    end_id: int
    fingerprint: str
    library: Any
    begin_id: int | None = None
    notes: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str]) -> tuple[TokenArray, IntArray]:
        """See `Tokenizer.encode`."""
        run = getattr(self.library, "encode_batch_fast", self.library.encode_batch)
        try:
            encoded = [np.asarray(e.ids, dtype=np.uint32) for e in run(list(texts), add_special_tokens=False)]
        except Exception as error:  # The library raises plain Exception, e.g. for a missing unknown-word token.
            raise UserError(f"tokenizer {self.name} cannot encode the data: {one_line(error)}") from None
        begin = np.array([] if self.begin_id is None else [self.begin_id], dtype=np.uint32)
        end = np.array([self.end_id], dtype=np.uint32)
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) + len(begin) + 1
        parts = [part for ids in encoded for part in (begin, ids, end)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self.library.decode(list(ids), skip_special_tokens=False))


def tokenizer_file(config: DataConfig) -> Path | None:
    """The tokenizer.json of `config`, which is there; None for bytes.

    Raises:
        UserError: no such file, or an end or begin token for bytes, which have their own or none.
    """
    if config.tokenizer in (None, BYTE_TOKENIZER):
        if config.end_token is not None:
            raise UserError("data.end_token does not apply to the byte tokenizer, which ends a document with id 256")
        if config.begin_token is not False:
            raise UserError("data.begin_token does not apply to the byte tokenizer, which has no token for it")
        return None
    assert config.tokenizer is not None
    path = file_of(config.tokenizer)
    if not path.is_file():
        problem = "is no file" if path.exists() else "does not exist"
        raise UserError(f'data.tokenizer = "{path}" {problem}; give "byte" or a tokenizer.json file')
    return path


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config.tokenizer` names: `byte`, a `tokenizer.json` file, or a directory that holds one.

    Raises:
        UserError: no such file, a broken file, a missing package, or no end token to be found.
    """
    path = tokenizer_file(config)
    if path is None:
        return ByteTokenizer()
    library, content = _open_library(path)
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"{path} has an empty vocabulary")
    end_id = _end_id(path, config.end_token, vocabulary)
    digest = hashlib.blake2b(content, digest_size=20)
    digest.update(f"end {end_id}".encode())
    begin_id = _begin_id(path, config.begin_token, vocabulary, library)
    if begin_id is not None:
        digest.update(f"begin {begin_id}".encode())
    return FileTokenizer(
        name=str(path),
        vocab_size=1 + max(vocabulary.values()),
        end_id=end_id,
        fingerprint=digest.hexdigest(),
        library=library,
        begin_id=begin_id,
        notes=() if config.begin_token is not False else _unused_begin(path, vocabulary, library),
    )


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a model whose embedding has no row for some id of the tokenizer.

    Raises:
        UserError: `vocab_size` of the model is smaller than `tokenizer.vocab_size`.
    """
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} does not match the model: its ids reach {tokenizer.vocab_size - 1}, the model "
            f"has vocab_size {vocab_size}; take the model's own tokenizer or a vocab_size of {tokenizer.vocab_size} "
            "or more"
        )


def _open_library(path: Path) -> tuple[Any, bytes]:
    tokenizers = require("tokenizers", "data", f"tokenizer {path}")
    try:
        content = path.read_bytes()
        library = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # The library raises plain Exception for whatever it cannot parse.
        raise UserError(f"{path} is not a valid tokenizer.json: {one_line(error)}") from None
    # Files carry the padding and truncation set when they were saved; both would change documents silently.
    library.no_padding()
    library.no_truncation()
    return library, content


def _end_id(path: Path, end_token: str | None, vocabulary: dict[str, int]) -> int:
    if end_token is not None:
        if end_token not in vocabulary:
            raise UserError(f'data.end_token = "{end_token}" is not in the vocabulary of {path}')
        return vocabulary[end_token]
    stated = _stated_id(path, "eos_token", vocabulary, "data.end_token")
    if stated is None:
        stated = _id_of_model(path.with_name("config.json"), set(vocabulary.values()))
    if stated is not None:
        return stated
    for name in COMMON_END_TOKENS:
        if name in vocabulary:
            return vocabulary[name]
    raise UserError(
        f"{path} has none of the end tokens {', '.join(COMMON_END_TOKENS)}; set data.end_token to one of its tokens"
    )


def _id_of_model(path: Path, known: set[int]) -> int | None:
    """The (first) `eos_token_id` of the model's configuration, where that lies beside the tokenizer."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    stated = settings.get("eos_token_id") if isinstance(settings, dict) else None
    first = stated[0] if isinstance(stated, list) and stated else stated
    return first if type(first) is int and first in known else None


def _begin_id(path: Path, begin_token: str | int | bool, vocabulary: dict[str, int], library: Any) -> int | None:
    if begin_token is False:
        return None
    if begin_token is True:
        own = _ids_in_front(library)
        if len(own) > 1:
            raise UserError(f"{path} puts {len(own)} tokens in front of a text; set data.begin_token to one token")
        begin_id = own[0] if own else _stated_id(path, "bos_token", vocabulary, "data.begin_token")
        if begin_id is None:
            raise UserError(f"{path} has no begin token of its own; set data.begin_token to one of its tokens or false")
        return begin_id
    if begin_token in vocabulary:
        return vocabulary[str(begin_token)]
    if type(begin_token) is int and begin_token in vocabulary.values():
        return begin_token
    raise UserError(f"data.begin_token = {json.dumps(begin_token)} is not in the vocabulary of {path}")


def _ids_in_front(library: Any) -> list[int]:
    """What the file's own template puts in front of a text."""
    try:
        plain, framed = (list(library.encode("a", add_special_tokens=framed).ids) for framed in (False, True))
    except Exception:  # The library raises plain Exception; encoding the data will report it.
        return []
    starts = (i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[: next(starts, 0)]


def _unused_begin(path: Path, vocabulary: dict[str, int], library: Any) -> tuple[str, ...]:
    """A line for a run that trains without the begin token which the file puts in front of every text."""
    own = _ids_in_front(library)
    if not own:
        return ()
    names = {i: name for name, i in vocabulary.items()}
    tokens = " ".join(names.get(i, str(i)) for i in own)
    return (f"{path} puts {tokens} in front of a text, this run does not; to do so set data.begin_token = true",)


def _stated_id(path: Path, key: str, vocabulary: dict[str, int], setting: str) -> int | None:
    """Id of a token that the tokenizer_config.json beside `path` names; None when there is no file or it does not."""
    path_stated = path.with_name("tokenizer_config.json")
    try:
        settings = json.loads(path_stated.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path_stated}: {one_line(error)}; repair it or set {setting}") from None
    token = settings.get(key) if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    if token not in vocabulary:
        raise UserError(
            f'tokenizer_config.json beside {path} says {key} "{token}", which the vocabulary lacks; set {setting}'
        )
    return vocabulary[token]
