"""Where text comes from: files on disk, opened into a lazy stream of named documents.

A `TextSource` is a fixed, sorted list of files; `iter_documents` reads them one after the other and
`content_fingerprint` identifies what they hold. Invariants: the same files give the same documents in the same order on
every machine; which files there are follows one rule, that of `bytescale.data.walk`, whatever the kind of source. Only
`python-stdlib` decodes leniently, since the standard library's own tests hold files in other encodings: bytes that are
not UTF-8 become U+FFFD there.

Cost: that of the readers in `bytescale.data.documents`.
"""

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

from bytescale.config.data import DocumentsConfig, Source
from bytescale.data.digests import file_digests
from bytescale.data.documents import Document, jsonl_documents, parquet_documents, text_document, unreadable
from bytescale.data.walk import find_files, split_glob
from bytescale.errors import UserError

_NOT_STDLIB = ("__pycache__", "site-packages", "dist-packages")


@dataclass(frozen=True)
class TextSource:
    """A list of files and how to read documents from them.

    Attributes:
        kind: kind of source.
        root: directory that `files` are relative to.
        files: relative POSIX paths, sorted.
        text_field: JSON key or parquet column that holds the text.
        left_out: what the search for the files passed over, in words; empty for nothing.
    """

    kind: Source
    root: Path
    files: tuple[str, ...]
    text_field: str
    left_out: str = ""

    @property
    def paths(self) -> list[Path]:
        return [self.root / name for name in self.files]


class Position(NamedTuple):
    """A place between two documents: how many files lie wholly before it, and how many documents of the next file."""

    file: int = 0
    document: int = 0


def open_source(config: DocumentsConfig) -> TextSource:
    """Find the files of `config`.

    Raises:
        UserError: the path does not exist, is of the wrong kind, or matches no file.
    """
    unwanted: tuple[str, ...] = ()
    assert config.source is not None
    if config.source == "python-stdlib":
        root, pattern, unwanted = sysconfig.get_path("stdlib"), "**/*.py", _NOT_STDLIB
        sought = f"no .py file in the standard library at {root}"
    else:
        assert config.path is not None
        path = config.path
        if config.source == "text-tree":
            root, pattern = _checked_tree(path), config.glob
            sought = f"no file matches {pattern} under {root}"
        else:
            root, pattern = _split_listed(path)
            sought = f"no file matches {path}"
    if pattern:
        found = find_files(root, pattern, unwanted, "data.glob" if config.source == "text-tree" else "data.path")
        files, left_out = found.names, found.left_out
    else:
        files, left_out = (os.path.basename(root),), ""
        root = os.path.dirname(root)
    if not files:
        passed_over = f"; left out: {left_out}" if left_out else ""
        raise UserError(f'data.source = "{config.source}" is empty: {sought}{passed_over}')
    return TextSource(config.source, Path(root), files, config.text_field, left_out)


def iter_documents(source: TextSource) -> Iterator[Document]:
    """The documents of `source`, file by file.

    Raises:
        UserError: a file cannot be read or decoded, or a record of it holds no text; the message names it.
    """
    return (document for document, _ in documents_from(source, Position()))


def documents_from(source: TextSource, begin: Position) -> Iterator[tuple[Document, Position]]:
    """The documents after `begin`, each with the position after it; files before `begin` are not opened."""
    for number in range(begin.file, len(source.files)):
        documents = _documents(source, source.files[number])
        first = begin.document if number == begin.file else 0
        for index, document in enumerate(itertools.islice(documents, first, None), first + 1):
            yield document, Position(number, index)


def document_name(source: TextSource, index: int) -> str:
    """Name of document `index`, found by reading up to it: for messages, not for loops."""
    return next(itertools.islice(iter_documents(source), index, None)).name


def content_fingerprint(source: TextSource, digests: Sequence[str] | None = None) -> str:
    """Hexadecimal digest of the kind and of the contents of all files, in order.

    File names, places and times do not enter, so a moved or touched tree keeps its fingerprint.

    Args:
        source: the files.
        digests: what `file_digests` says of them, where the caller knows; None reads them.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.blake2b(source.kind.encode(), digest_size=20)
    if source.kind in ("jsonl", "parquet"):
        digest.update(b"\0" + source.text_field.encode())
    for of_file in file_digests(source.paths) if digests is None else digests:
        digest.update(bytes.fromhex(of_file))
    return digest.hexdigest()


def _documents(source: TextSource, name: str) -> Iterator[Document]:
    path = source.root / name
    try:
        if source.kind == "jsonl":
            yield from jsonl_documents(path, name, source.text_field)
        elif source.kind == "parquet":
            yield from parquet_documents(path, name, source.text_field)
        else:
            yield text_document(path, name, strict=source.kind == "text-tree")
    except OSError as error:
        raise unreadable(path, error) from error


def _checked_tree(path: str) -> str:
    if os.path.isdir(path):
        return path
    hint = "a text-tree needs a directory of text files"
    if has_magic(path):
        root, pattern = split_glob(path)
        hint = f'a text-tree takes a directory and a pattern: set data.path = "{root}" and data.glob = "{pattern}"'
    elif os.path.exists(path):
        root, name = os.path.split(path)
        hint = f'a text-tree takes a directory and a pattern: set data.path = "{root or "."}" and data.glob = "{name}"'
    raise UserError(f"data.path = {path} {'is not a directory' if os.path.exists(path) else 'does not exist'}; {hint}")


def _split_listed(path: str) -> tuple[str, str]:
    """Root and pattern of a file or glob; the pattern of a file is empty, its root is the file."""
    if os.path.isdir(path):
        raise UserError(f"data.path = {path} is a directory; give a file or a glob such as {os.path.join(path, '*')}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"data.path = {path} is not a regular file; the data is read more than once")
    if os.path.lexists(path):
        return path, ""
    if not has_magic(path):
        raise UserError(f"data.path = {path} does not exist")
    return split_glob(path)
