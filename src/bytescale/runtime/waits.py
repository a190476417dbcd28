"""How long this rank waited for others, summed per operation of the schedule and kind of transfer.

On the CPU a wait is the time that the host was blocked. On CUDA it is the time that the stream was, taken between two
recorded events. There is one wait a ring step and layer, tens of thousands a step at high degrees, so only their sums
are kept, and event pairs are used again as soon as the stream has passed them: at most `MAX_PENDING` exist.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

MAX_PENDING = 512
"""Pairs of events that the stream has not reached; a host that is further ahead waits for the oldest."""


@dataclass
class Wait:
    """Time that this rank stood still for transfers of `what` within one operation.

    Attributes:
        what: kind of transfer, e.g. `kv`.
        begin_s: when the host came to the first of them, as `perf_counter` counts.
        duration_s: of all of them together.
    """

    what: str
    begin_s: float
    duration_s: float = 0.0


class WaitLog:
    """The waits of one device since `reset`, one entry for every (operation, kind) that had any."""

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"
        self._pending: deque[tuple[Wait, Any, Any]] = deque()
        self._idle_events: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget all waits."""
        self._waits: list[Wait] = []
        self._current: dict[str, Wait] = {}
        self._fold(at_most=0)

    def next_operation(self) -> None:
        """What follows counts under a new entry."""
        self._current = {}

    def begin(self, what: str) -> Any:
        """A wait begins; give what this returns to `end`."""
        if what not in self._current:
            self._current[what] = Wait(what, time.perf_counter())
            self._waits.append(self._current[what])
        return self._event() if self._on_stream else time.perf_counter()

    def end(self, what: str, begin: Any) -> None:
        """The wait that began with `begin` is over."""
        if self._on_stream:
            self._pending.append((self._current[what], begin, self._event()))
            self._fold(at_most=MAX_PENDING)
        else:
            self._current[what].duration_s += time.perf_counter() - begin

    def waits(self) -> list[Wait]:
        """All entries; on CUDA this waits until the stream has passed the last of them."""
        self._fold(at_most=0)
        return list(self._waits)

    def _event(self) -> Any:
        event = self._idle_events.pop() if self._idle_events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _fold(self, at_most: int) -> None:
        """Add pairs that the stream has passed to their entries, and wait for the oldest beyond `at_most`."""
        while self._pending:
            wait, begin, end = self._pending[0]
            if len(self._pending) > at_most:
                end.synchronize()
            elif not end.query():
                return
            self._pending.popleft()
            wait.duration_s += begin.elapsed_time(end) / 1e3
            self._idle_events += (begin, end)
