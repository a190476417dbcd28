"""Files that are whole or absent, also after a crash of the machine; and how paths are read and shown.

A file is written under a temporary name beside the target, brought to the disk, then renamed; the rename itself is
brought to the disk with the directory. Cost: two waits for the disk a file.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import tempfile
from pathlib import Path

DIGEST_BYTES = 20
"""Of a checksum, BLAKE2b."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)

StrPath = str | os.PathLike[str]


def write_text_atomically(path: StrPath, text: str) -> None:
    """Write `text` to `path` through a temporary file in the same directory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk, where the file system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def sync_tree(directory: Path) -> None:
    """Bring everything below `directory` to the disk."""
    for path in directory.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(directory)


def exchange(left: Path, right: Path) -> bool:
    """Let two directories change places in one step; False where kernel or file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(right))


def file_digest(path: Path) -> str:
    """Checksum of a file's contents, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def current_umask() -> int:
    """Permissions that new files of this process lack."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def expand_home(text: str) -> str | None:
    """`text` with a leading `~` or `~user` replaced; None where there is no such home directory."""
    if not text.startswith("~"):
        return text
    # An empty HOME would make `~/x` a file of the root directory.
    if text.split("/")[0] == "~" and os.environ.get("HOME") == "":
        return None
    expanded = os.path.expanduser(text)
    return None if expanded == text else expanded


def shown(path: Path) -> str:
    """`path` as a person would type it here: relative where it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)
