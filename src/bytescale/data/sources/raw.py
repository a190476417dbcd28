"""The bytes of a file, decompressed, and words for what a file is that is not what was asked for.

gzip, bzip2, xz and zstd are told by the first bytes of a file, whatever it is called. Invariant: broken compressed data
is an error that names the file, never a silent end.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bytescale.data.optional import one_line, require
from bytescale.errors import UserError

BOM = b"\xef\xbb\xbf"


def _open_zstd(file: Any) -> Any:
    arrow = require("pyarrow", "data", "data that is compressed with zstd")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"))


_COMPRESSED: tuple[tuple[bytes, Callable[..., Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"\xfd7zXZ\x00", lzma.open),
    *((b"BZh%d1AY&SY" % level, bz2.open) for level in range(1, 10)),
    (b"\x28\xb5\x2f\xfd", _open_zstd),
)
_FOREIGN = (
    (b"\x04\x22\x4d\x18", "compressed with lz4, which is not supported yet; decompress it, or compress it with gzip"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it"),
    (b"PAR1", 'a parquet file; set data.source = "parquet"'),
    (b"ARROW1", 'an Arrow file; set data.source = "arrow"'),
    (b"\x93NUMPY", "a numpy array; only text is read"),
    (b"\xff\xfe", "UTF-16 text; convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16 text; convert it to UTF-8"),
)
_TAR_AT, _TAR = 257, b"ustar"
HEAD_BYTES = _TAR_AT + len(_TAR)
"""So many first bytes tell what a file is."""


def unreadable(path: Path | str, error: OSError) -> UserError:
    """The refusal of a file or directory that the system does not let us read."""
    return UserError(f"cannot read {path}: {error.strerror or one_line(error)}")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed."""
    with open(path, "rb") as raw:
        head = raw.read(16)
        raw.seek(0)
        decompress = opener(head)
        if decompress is None:
            yield raw
            return
        with decompress(raw) as file:
            yield file


def opener(head: bytes) -> Callable[..., Any] | None:
    """What decompresses a file that begins so; None for one that is not compressed."""
    return next((opener for magic, opener in _COMPRESSED if head.startswith(magic)), None)


@contextmanager
def decompressing(path: Path) -> Iterator[None]:
    """Turn what broken compressed data raises inside the block into one line."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path} is compressed and damaged or cut short: {one_line(error)}") from None


def foreign(head: bytes) -> str | None:
    """What a file that is not text is, as the end of a sentence about it; None where its first bytes do not tell."""
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        return "is a tar archive; unpack it"
    return next((f"is {what}" for magic, what in _FOREIGN if head.startswith(magic)), None)
