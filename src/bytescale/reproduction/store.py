"""Keeps the rows of computed figures in a directory, so that a page can be written again without computing them again.

A file is good for the code that made it: its name carries a digest of every module and constant below the page. What
any change of planner, simulator, cost model or figures leaves behind is simply not found. Cost: reading 2 MB of source.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from bytescale.errors import UserError
from bytescale.files import write_text_atomically
from bytescale.reproduction.rows import Row

_PACKAGES = ("arrays.py", "cost", "lengths", "plan", "planner", "reproduction", "resources", "simulator")
_SUFFIXES = (".py", ".toml", ".csv")
_NO_NUMBERS = ("page", "__pycache__")


def code_digest() -> str:
    """Sixteen digits that change with anything a row can depend on."""
    found = hashlib.sha256()
    for name in _PACKAGES:
        _add(found, resources.files("bytescale").joinpath(name))
    return found.hexdigest()[:16]


def _add(found: "hashlib._Hash", place: Traversable) -> None:
    if place.is_dir():
        for inner in sorted(place.iterdir(), key=lambda each: each.name):
            if inner.name not in _NO_NUMBERS:
                _add(found, inner)
    elif place.name.endswith(_SUFFIXES):
        found.update(place.name.encode())
        found.update(place.read_bytes())


def kept_rows(directory: Path, figure: str, num_batches: int) -> list[Row] | None:
    """The rows that this very code computed before; None where there are none.

    Raises:
        UserError: the file cannot be read.
    """
    path = _path(directory, figure, num_batches)
    if not path.exists():
        return None
    try:
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} holds no rows of a reproduction: delete it") from None


def keep_rows(directory: Path, figure: str, num_batches: int, rows: Sequence[Row]) -> None:
    """Store the rows of a figure."""
    write_text_atomically(_path(directory, figure, num_batches), json.dumps([asdict(row) for row in rows]))


def _path(directory: Path, figure: str, num_batches: int) -> Path:
    return directory / f"{figure}-{num_batches}-{code_digest()}.json"
