"""Signals that end a run. Those that were ignored when this process began stay ignored, as under `nohup`."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from bytescale.errors import Interrupted
from bytescale.launch.failure import signal_name

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""What asks a process to end."""


def ending_signals() -> list[signal.Signals]:
    """The signals that ask this process to end, without those that it ignores."""
    return [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block such a signal raises `Interrupted` at once."""

    def raise_interrupted(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number, f"ended by {signal_name(number)}")

    with _handling(raise_interrupted):
        yield


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Inside the block such signals are only added to the list, in their order."""
    received: list[int] = []
    with _handling(lambda number, frame: received.append(number)):
        yield received


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
