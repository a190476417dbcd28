"""What went wrong in a rank, and which of several failures caused the others.

Peers of a dead rank fail within milliseconds of it, so the order in which ranks end says little; the kind of a failure
decides: a signal first, then bad input, then a run that cannot go on, then any other exception, and a lost peer only
when there is nothing else. NCCL's watchdog ends a process that waited too long for its peers with SIGABRT: that is a
lost peer as well.
"""

import errno
import json
import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from bytescale.errors import CommunicationError, Interrupted, RunError, UserError

Kind = Literal["signal", "user", "run", "exception", "peer"]
PRIORITY: tuple[Kind, ...] = ("signal", "user", "run", "exception", "peer")
"""Causes before consequences."""

MAX_TRACEBACK_CHARS = 16_000
"""So that a report fits a pipe and never blocks the rank that writes it."""

_WATCHDOG = re.compile(r"^.*(?:Watchdog caught collective|NCCL operations have failed or timed out).*$", re.MULTILINE)


@dataclass(frozen=True)
class Complaint:
    """An exception as people read it.

    Attributes:
        kind: see `Kind`; never `signal`.
        message: one line.
        traceback: of a defect; else empty.
    """

    kind: Kind
    message: str
    traceback: str = ""

    @property
    def exit_code(self) -> int:
        """2 for bad input, else 1."""
        return 2 if self.kind == "user" else 1

    def to_json(self) -> str:
        """One line that `read_complaint` reads."""
        return json.dumps(asdict(self))


def complaint(error: BaseException) -> Complaint:
    """`error` as it is shown. A full disk is not a defect of the program, wherever it is met."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return Complaint("user", message)
    if isinstance(error, RunError | Interrupted):
        return Complaint("run", message)
    if isinstance(error, CommunicationError):
        return Complaint("peer", message)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return Complaint("run", f"cannot write {error.filename or 'the output'}: {error.strerror}")
    trace = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
    return Complaint("exception", f"{type(error).__name__}: {message}" if message else type(error).__name__, trace)


def read_complaint(text: bytes) -> Complaint | None:
    """What `Complaint.to_json` wrote; None if a rank left nothing or only part of it."""
    try:
        return Complaint(**json.loads(text))
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class RankFailure:
    """Why a run ended.

    Attributes:
        rank: the rank at fault; None for the checks that come before ranks.
        pid: its process.
        kind: `signal` (killed), `user` (bad input), `run` (disk full, diverged), `exception`, or `peer` (lost another
            rank).
        exit_code: negative for a signal, as in `subprocess`.
        message: one line, empty when the rank left none.
        traceback: of an unexpected exception; else empty.
        last_step: last step in the run's metrics; None before the first.
    """

    rank: int | None
    pid: int
    kind: Kind
    exit_code: int
    message: str = ""
    traceback: str = ""
    last_step: int | None = None


def failure_of(rank: int | None, pid: int, exit_code: int, report: bytes, errors: str) -> RankFailure:
    """The failure of a rank that ended with `exit_code`.

    Args:
        rank: the rank, if it is one.
        pid: its process.
        exit_code: not 0; negative for a signal.
        report: what the rank left, see `Complaint.to_json`.
        errors: the end of its standard error.
    """
    found = read_complaint(report)
    if found is not None:
        # Also of a rank that was ended before it could leave by itself.
        return RankFailure(rank, pid, found.kind, found.exit_code, found.message, found.traceback)
    if exit_code >= 0:
        return RankFailure(rank, pid, "user" if exit_code == 2 else "exception", exit_code)
    watchdog = _WATCHDOG.search(errors) if exit_code == -signal.SIGABRT else None
    if watchdog is not None:
        return RankFailure(rank, pid, "peer", exit_code, " ".join(watchdog.group().split()))
    return RankFailure(rank, pid, "signal", exit_code)


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that caused the others; `failures` in the order in which they were met, at least one."""
    return min(failures, key=lambda failure: PRIORITY.index(failure.kind))


def describe(failure: RankFailure) -> str:
    """`failure` as one line. A `UserError` or `RunError` speaks for itself; all else names rank, pid and last step."""
    if failure.kind in ("user", "run") and failure.message:
        return failure.message
    when = after_step(failure.last_step)
    if failure.exit_code < 0:
        what = f"was killed by {signal_name(-failure.exit_code)} {when}"
    else:
        what = f"failed with exit code {failure.exit_code} {when}"
    who = "the check of the run" if failure.rank is None else f"rank {failure.rank}"
    return f"{who} (pid {failure.pid}) {what}" + (f": {failure.message}" if failure.message else "")


def after_step(last_step: int | None) -> str:
    """When a run ended, in words."""
    return "before the first step" if last_step is None else f"after step {last_step}"


def signal_name(number: int) -> str:
    """`SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
