"""Lines for a person who may have left: a run goes on when the reader of its output goes away."""

import errno
import os
import sys
from typing import TextIO

from rich.console import Console, RenderableType

_GONE = (errno.EPIPE, errno.EIO)
"""What writing to a closed pipe and to a terminal that hung up gives."""


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on standard output unless told otherwise. Once its reader is gone, lines go nowhere."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        silence(stream)


def say_table(table: RenderableType) -> None:
    """Print a table on standard output, as wide as that is."""
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(table)
    say(captured.get().rstrip("\n"))


def silence(stream: TextIO) -> None:
    """Let a stream, whose reader is gone, lead nowhere, so that nothing fails later, nor at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
