"""What a path in a configuration means: `~` is a home directory, a relative path counts from the working directory."""

import glob as globbing
import os
from pathlib import Path

from bytescale.errors import UserError
from bytescale.files import expand_home


def absolute_path(key: str, text: str, *, glob: bool = False) -> str:
    """The place that `text` names, absolute; `..` and symbolic links stay as they are.

    Args:
        key: the configuration key, for messages.
        text: as written.
        glob: whether it may be a pattern; the working directory in front of one is taken literally.

    Raises:
        UserError: there is no such home directory, or no working directory.
    """
    expanded = expand_home(text)
    if expanded is None:
        raise UserError(f"{key} = {text}: there is no home directory for {text.split('/')[0]}; give an absolute path")
    if os.path.isabs(expanded):
        return expanded
    try:
        directory = Path.cwd()
    except OSError:
        raise UserError(
            f"{key} = {text} is relative, but the working directory is gone; give an absolute path"
        ) from None
    return str(Path(_literally(directory) if glob and _is_pattern(expanded) else directory) / expanded)


def _is_pattern(text: str) -> bool:
    return globbing.has_magic(text) and not os.path.lexists(text)


def _literally(directory: Path) -> str:
    return globbing.escape(str(directory))
