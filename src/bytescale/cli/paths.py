"""Paths on the command line: a leading `~` is home, also behind an option's `=`, where no shell replaces it."""

import os
from pathlib import Path
from typing import Any

import click

from bytescale.errors import UserError
from bytescale.files import expand_home


class UserPath(click.Path):
    """A path as a person writes it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(at_home(os.fspath(value)), param, ctx)


def at_home(text: str) -> str:
    """`text` with a leading `~` replaced.

    Raises:
        UserError: there is no such home directory.
    """
    expanded = expand_home(text)
    if expanded is None:
        raise UserError(f"{text}: there is no such home directory; write the whole path")
    return expanded
