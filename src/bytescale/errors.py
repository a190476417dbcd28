"""The kinds of failure that a person reads as one line.

`UserError` is bad input: it says what was asked, what is possible and the nearest fix, and the command line turns it
into exit code 2 without a traceback. `CommunicationError` is a peer that did not answer in time or went away: it names
the waiting rank, the peer and the operation, and ends the process with exit code 1. `RunError` is a run that cannot go
on although input and ranks are sound, because the disk is full or training diverged; exit code 1. `Interrupted` is a
run that a signal ended. Everything else is a defect of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, configuration or file. The message is one line and complete in itself."""


class CommunicationError(RuntimeError):
    """A wait on another rank failed or ran out of time. The message names both ranks and the operation."""


class RunError(RuntimeError):
    """The run cannot go on, and no rank or program is at fault. The message is one line and complete in itself."""


class Interrupted(BaseException):
    """A signal ended the run. The message is one line; the exit code is 128 + `signal_number`, as shells have it.

    No `KeyboardInterrupt`: click would take it for Ctrl-C, whatever the signal.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def counted(number: int, noun: str, form: str = "") -> str:
    """A number and its noun: `1 rank`, `2 batches`; with `form` a comma `12,000 tokens`."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:{form}} {noun}{plural}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that point from an unknown `name` to what is known.

    Returns:
        `did you mean 'x'?` when one known name is close, else `known: a, b, c`, the first dozen.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names[:12])}" + (", ..." if len(names) > 12 else "")
