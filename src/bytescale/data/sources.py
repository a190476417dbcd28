"""Where text comes from: files on disk, opened into a lazy stream of named documents.

A `TextSource` is a fixed, sorted list of files; `iter_documents` reads them one after the other and
`content_fingerprint` identifies what they hold. Invariants: the same files give the same documents in the same order on
every machine; text is never stripped or normalised; a file that cannot be read or decoded is an error that names it,
never a silent gap. Only `python-stdlib` decodes leniently, since the standard library's own tests hold files in other
encodings: bytes that are not UTF-8 become U+FFFD there.

Cost: memory of one document (one record batch of `parquet`); a fingerprint reads every byte once.
"""

import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from bytescale.config.schema import DataConfig, Source
from bytescale.data.optional import one_line, require
from bytescale.errors import UserError, nearest

PARQUET_BATCH_ROWS = 256
"""Rows of one record batch; small, since one row may be a whole book."""

_NOT_STDLIB = ("__pycache__", "site-packages", "dist-packages")


@dataclass(frozen=True)
class Document:
    """One raw text. `name` says where it came from: a relative path, or file:line."""

    name: str
    text: str


@dataclass(frozen=True)
class TextSource:
    """A list of files and how to read documents from them.

    Attributes:
        kind: kind of source.
        root: directory that `files` are relative to.
        files: relative POSIX paths, sorted.
        text_field: JSON key or parquet column that holds the text.
    """

    kind: Source
    root: Path
    files: tuple[str, ...]
    text_field: str


def open_source(config: DataConfig) -> TextSource:
    """Find the files of `config`.

    Raises:
        UserError: the path does not exist, is of the wrong kind, or matches no file.
    """
    if config.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _stdlib_files(root)
        sought = f"no .py file in the standard library at {root}"
    else:
        assert config.path is not None
        path = config.path
        if config.source == "text-tree":
            root, files = _tree_files(path, config.glob)
            sought = f"no file matches {config.glob} under {path}; hidden files and directories are skipped"
        else:
            root, files = _listed_files(path)
            sought = f"no file matches {path}"
    if not files:
        raise UserError(f'data.source = "{config.source}" is empty: {sought}')
    return TextSource(kind=config.source, root=root, files=tuple(sorted(files)), text_field=config.text_field)


def iter_documents(source: TextSource) -> Iterator[Document]:
    """The documents of `source`, file by file.

    Raises:
        UserError: a file cannot be read or decoded, or a record of it holds no text; the message names it.
    """
    for name in source.files:
        path = source.root / name
        try:
            if source.kind == "jsonl":
                yield from _jsonl_documents(path, name, source.text_field)
            elif source.kind == "parquet":
                yield from _parquet_documents(path, name, source.text_field)
            else:
                yield Document(name, _decode(path, strict=source.kind == "text-tree"))
        except OSError as error:
            raise _unreadable(path, error) from None


def document_name(source: TextSource, index: int) -> str:
    """Name of document `index`, found by reading up to it: for messages, not for loops."""
    return next(itertools.islice(iter_documents(source), index, None)).name


def content_fingerprint(source: TextSource) -> str:
    """Hexadecimal digest of the kind and of the contents of all files, in order.

    File names, places and times do not enter, so a moved or touched tree keeps its fingerprint.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.blake2b(source.kind.encode(), digest_size=20)
    if source.kind in ("jsonl", "parquet"):
        digest.update(b"\0" + source.text_field.encode())
    for name in source.files:
        path = source.root / name
        try:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise _unreadable(path, error) from None
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or one_line(error)}")


def _stdlib_files(root: Path) -> list[str]:
    files: list[str] = []
    for directory, names, leaves in os.walk(root):
        names[:] = [name for name in names if name not in _NOT_STDLIB and not name.startswith(".")]
        files += [str(Path(directory, leaf).relative_to(root).as_posix()) for leaf in leaves if leaf.endswith(".py")]
    return files


def _tree_files(path: str, pattern: str) -> tuple[Path, list[str]]:
    root = Path(path)
    if not root.is_dir():
        problem = "is not a directory" if root.exists() else "does not exist"
        raise UserError(f"data.path = {path} {problem}; a text-tree needs a directory of text files")
    # A pattern that names a hidden part itself asks for it.
    wants_hidden = any(part.startswith(".") for part in PurePath(pattern).parts)
    files: list[str] = []
    try:
        for found in root.glob(pattern):
            relative = found.relative_to(root)
            hidden = any(part.startswith(".") for part in relative.parts)
            if (wants_hidden or not hidden) and found.is_file():
                files.append(relative.as_posix())
    except OSError as error:
        raise _unreadable(root, error) from None
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"data.glob = {pattern!r} cannot be used ({one_line(error)}); give a relative pattern such as **/*.txt"
        ) from None
    return root, files


def _listed_files(path: str) -> tuple[Path, list[str]]:
    if os.path.isdir(path):
        raise UserError(f"data.path = {path} is a directory; give a file or a glob such as {os.path.join(path, '*')}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"data.path = {path} is not a regular file; the data is read more than once")
    if os.path.lexists(path):
        found = [path]
    elif glob.has_magic(path):
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    else:
        raise UserError(f"data.path = {path} does not exist")
    if not found:
        return Path(), []
    root = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in found])
    return Path(root), [Path(os.path.relpath(name, root)).as_posix() for name in found]


def _decode(path: Path, strict: bool) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8", errors="strict" if strict else "replace")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it or narrow data.glob to leave it out"
        ) from None


def _jsonl_documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            yield Document(f"{name}:{number}", _jsonl_text(line, f"{path}:{number}", text_field))


def _jsonl_text(line: bytes, place: str, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not a line of JSON: {one_line(error)}") from None
    if not isinstance(record, dict):
        raise UserError(f'{place} holds a {type(record).__name__}; each line must be an object with "{text_field}"')
    if text_field not in record:
        raise UserError(f'{place} has no "{text_field}"; set data.text_field ({nearest(text_field, record)})')
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f'{place}: "{text_field}" is a {type(text).__name__}, not text; set data.text_field')
    if b"\\u" in line:
        # JSON can escape half of a surrogate pair, which no UTF-8 text and no tokenizer can hold.
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f'{place}: "{text_field}" holds half of a surrogate pair; it is not valid text') from None
    return text


def _parquet_documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    parquet = require("pyarrow.parquet", "data", 'data.source = "parquet"')
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                raise UserError(
                    f'{path} has no column "{text_field}"; set data.text_field ({nearest(text_field, columns)})'
                )
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[text_field]):
                for value in batch.column(0):
                    text = value.as_py()
                    if text is not None and not isinstance(text, str):
                        raise UserError(
                            f'{path}: column "{text_field}" holds {type(text).__name__}, not text; set data.text_field'
                        )
                    yield Document(f"{name}:{row}", text or "")
                    row += 1
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as parquet (row {row}): {one_line(error)}") from None
