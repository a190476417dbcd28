"""Documents of a chunk to tokens, lengths, masks and digests, as flat arrays.

Text goes through the tokenizer, a conversation through the chat template, and ids are taken as they stand: only text
gets an end token. Invariant: what cannot be encoded is an error that names the document; with `skip` it is left out and
counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import IntArray
from bytescale.config.data import DocumentsConfig, OnError
from bytescale.data.documents.held_out import DigestArray, content_digests
from bytescale.data.encoding.chat import ChatTemplate, load_template
from bytescale.data.sources.content import Chat, Document, MaskArray, TokenIds
from bytescale.data.tokenizers import TokenArray, Tokenizer
from bytescale.errors import UserError


@dataclass(frozen=True, eq=False)
class Encoded:
    """Documents one after the other.

    Attributes:
        tokens: of all of them. Shape [sum(lengths)].
        lengths: tokens of each. Shape [num_documents].
        digests: of the contents of each, before they were tokenised. Shape [num_documents].
        mask: 1 for targets; None where every token is one. Shape [sum(lengths)].
        num_skipped: documents that were left out.
        failure: why the first of them was; empty for none.
    """

    tokens: TokenArray
    lengths: IntArray
    digests: DigestArray
    mask: MaskArray | None
    num_skipped: int = 0
    failure: str = ""


@dataclass(frozen=True, eq=False)
class Encoder:
    """How the documents of one source become tokens.

    Attributes:
        tokenizer: of text.
        chat: of conversations; None where there are none.
        is_masked: whether masks are kept.
        gives_ids: whether documents are ids already, so that none of them opens or ends with a token of ours.
        on_error: what a document that cannot be encoded does.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    is_masked: bool = False
    gives_ids: bool = False
    on_error: OnError = "stop"

    @property
    def fingerprint(self) -> str:
        """Everything that decides tokens and masks."""
        parts = [self.tokenizer.fingerprint if not self.gives_ids else "ids"]
        parts += [f"chat {self.chat.fingerprint}"] if self.chat is not None else []
        # What is skipped with "skip" is an error without it.
        parts += ["skip"] if self.on_error == "skip" else []
        return "\n".join(parts)

    @property
    def num_frame_tokens(self) -> int:
        """Tokens of every document that are not of its contents: the end token of a text, the begin token if any."""
        if self.chat is not None or self.gives_ids:
            return 0
        return 1 if self.tokenizer.begin_id is None else 2

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The narrowest type that holds every id."""
        return np.dtype("<u4" if self.gives_ids or self.tokenizer.vocab_size > 1 << 16 else "<u2")

    def encode(self, items: Iterable[Document | UserError]) -> Encoded:
        """Encode what was read.

        Raises:
            UserError: a document cannot be read or encoded, and none is to be skipped.
        """
        failures: list[UserError] = []
        documents: list[Document] = []
        for item in items:
            self._refuse(item, failures) if isinstance(item, UserError) else documents.append(item)
        if self.chat is not None or self.gives_ids:
            tokens, lengths, mask = self._ids(documents, failures)
        else:
            texts = [document.content for document in documents if isinstance(document.content, str)]
            (tokens, lengths), mask = self.tokenizer.encode(texts), None
        digests = content_digests([document.raw for document in documents])
        failure = str(failures[0]) if failures else ""
        return Encoded(tokens, lengths, digests, mask if self.is_masked else None, len(failures), failure)

    def _refuse(self, error: UserError, failures: list[UserError]) -> None:
        if self.on_error == "stop":
            raise error
        failures.append(error)

    def _ids(self, documents: list[Document], failures: list[UserError]) -> tuple[TokenArray, IntArray, MaskArray]:
        """Ids, lengths and mask of documents; those that have none are taken from `documents`."""
        chats = [(document.name, document.content) for document in documents if isinstance(document.content, Chat)]
        of_chats = iter(self.chat.encode(chats) if self.chat is not None else [])
        kept, found = [], []
        for document in documents:
            ids = document.content if isinstance(document.content, TokenIds) else next(of_chats)
            if isinstance(ids, UserError):
                self._refuse(ids, failures)
            else:
                kept.append(document)
                found.append(ids)
        documents[:] = kept
        nothing = np.zeros(0, dtype=np.uint32)
        masks = [np.ones(len(f.ids), dtype=np.uint8) if f.mask is None else f.mask for f in found]
        lengths = np.array([len(f.ids) for f in found], dtype=np.int64)
        mask = np.concatenate([*masks, nothing.astype(np.uint8)])
        return np.concatenate([nothing, *(f.ids for f in found)]), lengths, mask


def make_encoder(config: DocumentsConfig, tokenizer: Tokenizer, on_error: OnError = "stop") -> Encoder:
    """How the documents of the source `config` become tokens.

    Raises:
        UserError: conversations without a chat template.
    """
    chat = load_template(config, tokenizer) if config.content == "messages" else None
    gives_ids = config.content == "tokens" or config.source == "megatron"
    return Encoder(tokenizer, chat, config.is_masked, gives_ids, on_error)
