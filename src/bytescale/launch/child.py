"""A forked child that cannot outlive its parent, reads no input and says why it failed.

Forking is safe while this process has computed nothing: imports start no thread that a child would miss, a parallel
region, a backward pass or a CUDA context would. What must compute first, such as a check of the model, does so in a
child of its own.
"""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from bytescale.launch.failure import complaint
from bytescale.launch.signals import ENDING_SIGNALS

_ERRORS_KEPT_BYTES = 16_384
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass
class Child:
    """A running or ended child, seen from its parent.

    Attributes:
        rank: its rank; None for a child that is not a rank.
        pid: its process, which leads a session of its own.
        report_fd: where its complaint arrives, see `bytescale.launch.failure`.
        errors_fd: its standard error.
        report: what has arrived on `report_fd`.
        errors: the end of what has arrived on `errors_fd`.
        exit_code: None while it runs; negative for a signal.
        ended_by_us: whether the parent killed it.
    """

    rank: int | None
    pid: int
    report_fd: int
    errors_fd: int
    report: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    ended_by_us: bool = False

    @property
    def stopped_by(self) -> int:
        """The signal on whose request it ended in good order, with 128 + that number; 0 if it did not."""
        number = (self.exit_code or 0) - 128
        return number if number in ENDING_SIGNALS else 0

    @property
    def pipes(self) -> tuple[int, int]:
        """What its parent reads from while it runs."""
        return self.report_fd, self.errors_fd

    def take_output(self) -> bool:
        """Read what has arrived, pass standard error on, and never wait; whether anything had arrived."""
        report, errors = _arrived(self.report_fd), _arrived(self.errors_fd)
        _write_errors(errors)
        self.report += report
        self.errors = (self.errors + errors)[-_ERRORS_KEPT_BYTES:]
        return bool(report or errors)

    def reap(self) -> bool:
        """Whether it has ended; what it started has then ended with it."""
        if self.exit_code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._collect()
        return self.exit_code is not None

    def kill(self) -> None:
        """End it now, unless it has ended by itself; a stopped process too."""
        if not self.reap():
            self.send(signal.SIGKILL)
            self._collect()
            self.ended_by_us = self.exit_code == -signal.SIGKILL

    def send(self, number: int) -> None:
        """Send a signal to its process, and wake it in case it was stopped."""
        os.kill(self.pid, number)
        os.kill(self.pid, signal.SIGCONT)

    def _collect(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # Not there when the child died before it led a group, or when nothing else is in it.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.take_output()
        os.close(self.report_fd)
        os.close(self.errors_fd)


def start_child(
    main: Callable[[], int | None],
    *,
    rank: int | None = None,
    environment: Mapping[str, str] | None = None,
    signals: Collection[int] = (),
    siblings: Collection[Child] = (),
) -> Child:
    """Fork a child that runs `main` and ends with its result.

    Args:
        main: what the child does; None counts as 0. An exception is reported to the parent, not shown.
        rank: see `Child`.
        environment: added to that of the child.
        signals: those that this process handles; the child is ended by them until it says otherwise. What is ignored
            here is ignored there.
        siblings: children so far, whose pipes the new one closes.
    """
    report_fd, write_report_fd = os.pipe()
    errors_fd, write_errors_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for fd in (report_fd, errors_fd, *(fd for s in siblings if s.exit_code is None for fd in s.pipes)):
                os.close(fd)
            for number in signals:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            os.environ.update(environment or {})
            _settle(parent, write_errors_fd)
            code = _outcome(main, write_report_fd)
        finally:
            # Nothing of the parent's, whose copy this process is, may run here; and a failed rank must not linger in
            # threads or destructors that wait for its peers.
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    os.close(write_report_fd)
    os.close(write_errors_fd)
    for fd in (report_fd, errors_fd):
        os.set_blocking(fd, False)
    return Child(rank, pid, report_fd, errors_fd)


def ignore_input() -> None:
    """Make standard input empty: nothing here reads it, and no library may."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _settle(parent: int, errors_fd: int) -> None:
    """Lead a session, die with the parent (Linux), and show stacks on a crash."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    ignore_input()
    os.dup2(errors_fd, 2)
    os.close(errors_fd)
    faulthandler.enable(file=2)


def _outcome(main: Callable[[], int | None], report_fd: int) -> int:
    """The exit code of `main`; an exception is written to the parent."""
    try:
        code = main() or 0
    except BaseException as error:
        found = complaint(error)
        os.write(report_fd, found.to_json().encode())
        code = found.exit_code
    for stream in (sys.stdout, sys.stderr):
        # Its reader may be gone.
        with suppress(OSError):
            stream.flush()
    return code


def _arrived(fd: int) -> bytes:
    """All bytes in a pipe."""
    found = b""
    with suppress(BlockingIOError):
        while data := os.read(fd, 65_536):
            found += data
    return found


def _write_errors(data: bytes) -> None:
    """Pass on to our own standard error, whose reader may be gone."""
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
