"""Files that are whole or absent: written under a temporary name beside the target, then renamed."""

import os
import tempfile
from pathlib import Path

StrPath = str | os.PathLike[str]


def write_text_atomically(path: StrPath, text: str) -> None:
    """Write `text` to `path` through a temporary file in the same directory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
