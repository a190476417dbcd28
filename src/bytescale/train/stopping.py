"""Ending a run on request: the first SIGINT, SIGTERM or SIGUSR1 ends it after the step under way, a second one at once.

Schedulers send SIGTERM or SIGUSR1 some time before they take a machine away.

What was ignored when the process began, as under nohup, stays ignored. A signal may arrive while the main thread waits
inside a library, where Python runs no handler, so a thread of its own reads what the interpreter's C handler writes
down. Cost: one sleeping thread.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        signal_number: the signal that asked; 0 while none has.
    """

    def __init__(self) -> None:
        self.signal_number = 0

    def receive(self, number: int) -> None:
        """Note a signal; the second one ends the process with 128 + its number."""
        if self.signal_number:
            os._exit(128 + number)
        self.signal_number = number


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Inside the block these signals are requests; afterwards they are what they were. Main thread only."""
    request = StopRequest()
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    thread = threading.Thread(target=_listen, args=(reader, request, set(handled)), name="bytescale-stop", daemon=True)
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # A handler must exist for the signal to be written down; it has nothing to do itself.
    before = {number: signal.signal(number, lambda *_: None) for number in handled}
    thread.start()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        writer.close()
        thread.join()
        reader.close()


def _listen(reader: socket.socket, request: StopRequest, handled: set[signal.Signals]) -> None:
    with suppress(OSError):
        while numbers := reader.recv(64):
            for number in numbers:
                if number in handled:
                    request.receive(number)
