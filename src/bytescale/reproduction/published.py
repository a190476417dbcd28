"""The paper's figures as data, from `published.toml`, which says of each how it was had.

They are compared with, never computed with: no figure of ours depends on them.
"""

import tomllib
from importlib import resources
from typing import Any


def published() -> dict[str, Any]:
    """All figures, by name."""
    return tomllib.loads(
        resources.files("bytescale.reproduction").joinpath("published.toml").read_text(encoding="utf-8")
    )
