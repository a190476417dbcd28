"""A source: a fixed, sorted list of files, opened into a stream of chunks and documents.

Invariants: the same files give the same documents in the same order on every machine; which files there are follows one
rule, that of `bytescale.data.sources.walk`, whatever the kind of source. Only `python-stdlib` decodes leniently, since
the standard library's own tests hold files in other encodings: bytes that are not UTF-8 become U+FFFD there.

Cost: that of the readers.
"""

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

from bytescale.config.data import DocumentsConfig
from bytescale.data.digests import file_digests
from bytescale.data.sources.chunks import Chunk, Limits, Position
from bytescale.data.sources.content import Document
from bytescale.data.sources.jsonl import line_chunks, line_documents
from bytescale.data.sources.megatron import indexed_chunks, indexed_documents
from bytescale.data.sources.raw import unreadable
from bytescale.data.sources.tables import row_documents, saved_files, table_chunks
from bytescale.data.sources.text_tree import file_chunks, text_document
from bytescale.data.sources.walk import find_files, split_glob
from bytescale.errors import UserError

_NOT_STDLIB = ("__pycache__", "site-packages", "dist-packages")
_WHOLE_FILES = ("text-tree", "python-stdlib")
START = Position()
LIMITS = Limits(1 << 20, 1024)


@dataclass(frozen=True)
class DocumentSource:
    """A list of files and how to read documents from them.

    Attributes:
        config: the keys of the source.
        root: directory that `files` are relative to.
        files: relative POSIX paths, sorted.
        left_out: what the search for the files passed over, in words; empty for nothing.
    """

    config: DocumentsConfig
    root: Path
    files: tuple[str, ...]
    left_out: str = ""

    @property
    def kind(self) -> str:
        return str(self.config.source)

    @property
    def paths(self) -> list[Path]:
        return [self.root / name for name in self.files]

    @property
    def content_paths(self) -> list[Path]:
        """Every file that decides the documents."""
        beside = [path.with_suffix(".bin") for path in self.paths] if self.kind == "megatron" else []
        return [*self.paths, *beside]


def open_source(config: DocumentsConfig) -> DocumentSource:
    """Find the files of `config`.

    Raises:
        UserError: the path does not exist, is of the wrong kind, or matches no file.
    """
    unwanted: tuple[str, ...] = ()
    if config.source == "python-stdlib":
        root, pattern, unwanted = sysconfig.get_path("stdlib"), "**/*.py", _NOT_STDLIB
        sought = f"no .py file in the standard library at {root}"
    else:
        assert config.path is not None
        path = config.path
        if config.source == "text-tree":
            root, pattern = _checked_tree(path), config.glob
            sought = f"no file matches {pattern} under {root}"
        elif config.source == "arrow" and os.path.isdir(path):
            files = tuple(saved_files(Path(path)))
            if not files:
                raise UserError(f'data.source = "arrow" is empty: no .arrow file in {path}')
            return DocumentSource(config, Path(path), files)
        else:
            root, pattern = _split_listed(_index_of(path) if config.source == "megatron" else path)
            sought = f"no file matches {path}"
    if pattern:
        found = find_files(root, pattern, unwanted, "data.glob" if config.source == "text-tree" else "data.path")
        names, left_out = found.names, found.left_out
    else:
        names, left_out = (os.path.basename(root),), ""
        root = os.path.dirname(root)
    if not names:
        passed_over = f"; left out: {left_out}" if left_out else ""
        raise UserError(f'data.source = "{config.source}" is empty: {sought}{passed_over}')
    source = DocumentSource(config, Path(root), names, left_out)
    lone = next((path for path in source.content_paths if config.source == "megatron" and not path.is_file()), None)
    if lone is not None:
        raise UserError(f"{lone} does not exist; a Megatron dataset is two files, .bin and .idx")
    return source


def chunks(source: DocumentSource, begin: Position = START, limits: Limits = LIMITS) -> Iterator[Chunk]:
    """The records after `begin`, in chunks; files before `begin` are not opened.

    Raises:
        UserError: a file cannot be read.
    """
    if source.kind in _WHOLE_FILES:
        try:
            yield from file_chunks(source.paths, begin, limits)
        except OSError as error:
            raise unreadable(error.filename or source.root, error) from error
        return
    for number in range(begin.file, len(source.files)):
        path = source.root / source.files[number]
        first = begin if number == begin.file else Position(number)
        try:
            yield from _chunks_of(source, path, first, limits)
        except UserError as error:
            yield Chunk(first, Position(number + 1), failure=str(error))
        except OSError as error:
            raise unreadable(path, error) from error


def documents(source: DocumentSource, chunk: Chunk) -> Iterator[Document | UserError]:
    """The documents of a chunk; an error in place of each that cannot be read.

    Raises:
        UserError: the system does not let a file be read.
    """
    if source.kind in _WHOLE_FILES:
        for name in source.files[chunk.begin.file : chunk.end.file]:
            try:
                yield text_document(source.root / name, name, strict=source.kind == "text-tree")
            except UserError as error:
                yield error
            except OSError as error:
                raise unreadable(source.root / name, error) from error
        return
    name = source.files[chunk.begin.file]
    path = source.root / name
    try:
        if source.kind == "jsonl":
            yield from line_documents(chunk, path, name, source.config)
        elif chunk.failure is None and source.kind == "megatron":
            yield from indexed_documents(chunk, path, name)
        elif chunk.failure is None:
            yield from row_documents(chunk, path, name, source.config)
    except UserError as error:
        yield error
    except OSError as error:
        raise unreadable(path, error) from error
    if chunk.failure is not None:
        yield UserError(chunk.failure)


def iter_documents(source: DocumentSource, begin: Position = START) -> Iterator[Document]:
    """The documents after `begin`, file by file.

    Raises:
        UserError: one of them cannot be read, or holds nothing of what was asked for; the message names it.
    """
    for chunk in chunks(source, begin):
        for document in documents(source, chunk):
            if isinstance(document, UserError):
                raise document
            yield document


def document_name(source: DocumentSource, index: int) -> str:
    """Name of document `index`, found by reading up to it: for messages, not for loops."""
    every = (document for chunk in chunks(source) for document in documents(source, chunk))
    good = (document.name for document in every if not isinstance(document, UserError))
    return next(itertools.islice(good, index, None))


def content_fingerprint(source: DocumentSource, digests: Sequence[str] | None = None) -> str:
    """Hexadecimal digest of what is read of the files and of the contents of all of them, in order.

    File names, places and times do not enter, so a moved or touched tree keeps its fingerprint.

    Args:
        source: the files.
        digests: what `file_digests` says of `source.content_paths`, where the caller knows; None reads them.

    Raises:
        UserError: a file cannot be read.
    """
    config = source.config
    keys = [source.kind] if source.kind in _WHOLE_FILES else [source.kind, config.content, *config.wanted_fields]
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=20)
    for of_file in file_digests(source.content_paths) if digests is None else digests:
        digest.update(bytes.fromhex(of_file))
    return digest.hexdigest()


def _chunks_of(source: DocumentSource, path: Path, begin: Position, limits: Limits) -> Iterator[Chunk]:
    if source.kind == "jsonl":
        return line_chunks(path, begin, limits)
    if source.kind == "megatron":
        return indexed_chunks(path, begin, limits)
    return table_chunks(path, begin, limits, source.config)


def _index_of(path: str) -> str:
    """The index of a Megatron dataset that is named by its index, its data, or what both begin with."""
    if path.endswith(".bin"):
        return f"{path.removesuffix('.bin')}.idx"
    return path if path.endswith(".idx") or has_magic(path) or os.path.lexists(path) else f"{path}.idx"


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
