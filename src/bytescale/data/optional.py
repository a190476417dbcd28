"""Imports of packages that only some sources need, with one line of advice when they are missing.

Invariant: `bytescale.data` imports optional packages through this module only, when a configuration asks for them, so
that `import bytescale.data` needs numpy alone.
"""

import importlib
from typing import Any

from bytescale.errors import UserError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import `module` now.

    Args:
        module: dotted name of the module.
        extra: extra of this package that installs it.
        purpose: what needs it, as the subject of a sentence.

    Raises:
        UserError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            raise
        raise UserError(f"{purpose} needs {package}: pip install 'bytescale[{extra}]'") from None


def one_line(error: BaseException, limit: int = 200) -> str:
    """The message of `error` on one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
