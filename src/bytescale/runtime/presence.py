"""Ranks that know of each other from before they prepare until they end, through a store and a thread each.

Preparing is not communicating: a node may tokenise for an hour while another has all in its cache. So every rank writes
a sign of life once a second and watches the rank after it, and a rank that is ready waits for the others as long as
they live. One that is silent for the bound is lost. A rank that fails leaves its error where the others see it with
their next sign of life, which also ends waits that no back-end bounds: on NCCL a wait only orders streams, and never
raises.

Cost: three small requests to the store a second and rank; nothing in the path of a step.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bytescale.errors import CommunicationError, counted
from bytescale.locks import restart_count

BEAT_S = 1.0
GRACE_S = 3.0
"""How long a rank that hears of a failure may take to come upon it by itself, with a word of its own."""

FIRST_WORD_S, NEXT_WORD_S = 10.0, 30.0
"""When a rank that waits for others says so, first and then again."""

MIN_START_S = 60.0
"""Bound of the way to the store; processes of one start do not come up at the same time."""

MAX_NAMED = 3

Lost = Callable[[CommunicationError], object]
"""Reports the error and ends this rank, from any thread; its main thread may be stuck in a wait."""

_READY, _DONE = "is ready", "is done"


class Presence:
    """This rank among those of its run.

    Attributes:
        rank, size: of the world.
        store: where the ranks meet; a connection that the thread here does not use.
    """

    def __init__(self, store: Store, own: Store, rank: int, size: int, silence_s: float, lost: Lost | None) -> None:
        """Appear.

        Args:
            store: for waits of the main thread.
            own: the same store over another connection, for the thread.
            rank, size: of the world.
            silence_s: a rank that gives no sign of life for so long is lost.
            lost: called once when a rank is lost or has failed and this one has not ended by itself; None where
                someone else ends it.
        """
        self.rank, self.size, self.store = rank, size, store
        self._own, self._silence_s, self._lost = own, silence_s, lost
        self._begin_s = time.monotonic()
        self._state = "starts"
        self._failure: str | None = None
        self._error: CommunicationError | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        if size > 1:
            self._beat()
            self._thread.start()

    def another_store(self) -> Any:
        """The store where the ranks meet, over a connection of its own, for another thread."""
        store: Any = self.store
        return store.clone()

    def doing(self, what: str) -> None:
        """What this rank is doing while others may wait for it, in words like `prepares data`."""
        self._state = what

    def wait_for_all(self, say: Callable[[str], None]) -> None:
        """Be ready, and wait until all are, however long they prepare; the first one ready says for whom.

        Raises:
            CommunicationError: a rank failed or is lost.
        """
        self._state = _READY
        self._wake.set()
        place, waited_from_s, next_word_s = self.store.add("ready", 1), time.monotonic(), FIRST_WORD_S
        poll_s = 0.01
        while self.store.add("ready", 0) < self.size:
            if self._error is not None:
                raise self._error
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, 0.5)
            waited_s = time.monotonic() - waited_from_s
            if place == 1 and waited_s >= next_word_s:
                next_word_s = waited_s + NEXT_WORD_S
                say(f"waiting for {self._not_ready()}")

    def close(self, error: BaseException | None) -> None:
        """Leave: done, or with the error that ends this rank. Never blocks for more than a moment."""
        if error is None:
            self._state = _DONE
        else:
            self._failure = " ".join(str(error).split()) or type(error).__name__
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * BEAT_S)

    def _not_ready(self) -> str:
        found = []
        for rank in range(self.size):
            beat = _read(self.store, f"beat {rank}")
            if beat is None:
                found.append(f"rank {rank}, which has not started")
            elif beat["state"] != _READY:
                found.append(f"rank {rank} on {beat['host']}, which {beat['state']} ({beat['age_s']:.0f} s so far)")
        more = f" and {counted(len(found) - MAX_NAMED, 'other rank')}" if len(found) > MAX_NAMED else ""
        return ", ".join(found[:MAX_NAMED]) + more

    def _beat(self) -> None:
        sign = {"state": self._state, "host": socket.gethostname(), "age_s": time.monotonic() - self._begin_s}
        self._own.set(f"beat {self.rank}", json.dumps(sign))

    def _run(self) -> None:
        """The thread: sends signs of life, watches the next rank, listens for failures."""
        beat_s = min(BEAT_S, self._silence_s / 8)
        heard_s = answered_s = time.monotonic()
        last_sign: Any = None
        while True:
            # Read first: what `close` sets before is then seen below.
            closing, now_s = self._closing.is_set(), time.monotonic()
            try:
                if self._failure is not None:
                    self._announce(f"rank {self.rank} failed: {self._failure}")
                self._beat()
                if closing:
                    return
                sign, reason = _read(self._own, f"beat {self._next}"), _read(self._own, "failure")
                answered_s = now_s
                if sign != last_sign or (sign is not None and sign["state"] == _DONE):
                    last_sign, heard_s = sign, now_s
                elif reason is None and now_s - heard_s > self._silence_s:
                    where = f" on {sign['host']}" if sign is not None else ""
                    reason = f"rank {self._next}{where} has given no sign of life for {now_s - heard_s:.0f} s"
                    self._announce(reason)
            except RuntimeError:
                # The store ends with the node that serves it, at the end of a run before some ranks.
                if closing:
                    return
                silent_s = now_s - answered_s
                late = silent_s > self._silence_s
                reason = f"the store where ranks meet has not answered for {silent_s:.0f} s" if late else None
            if reason is not None:
                self._end(reason)
                return
            self._wake.wait(beat_s)
            self._wake.clear()

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.size

    def _announce(self, reason: str) -> None:
        """Let all ranks know why the run ends, unless they know of a reason already."""
        self._own.compare_set("failure", "", json.dumps(reason))

    def _end(self, reason: str) -> None:
        """Let the main thread end by itself, which it can where its waits are bounded; else end the process."""
        self._error = CommunicationError(f"rank {self.rank}: {reason}")
        if not self._closing.wait(min(GRACE_S, self._silence_s)) and self._lost is not None:
            self._lost(self._error)


def _read(store: Store, key: str) -> Any:
    """The value of a key, or None."""
    return json.loads(store.get(key)) if store.check([key]) else None


def _store_of_this_start(shared: Any, rank: int, size: int) -> Any:
    """A part of the store that no earlier start of the run has written to.

    torchrun may serve one store for all of its attempts, where the addresses of ranks that are gone still stand. Every
    rank comes here once a start, so all of them count the same.
    """
    attempt = f"attempt {restart_count()} of {size}"
    return PrefixStore(f"{attempt}, start {shared.add(f'{attempt}, rank {rank}', 1)}", shared)


@contextmanager
def presence(silence_s: float, lost: Lost | None) -> Iterator[Presence]:
    """Make this rank known to the others that torchrun's variables describe; alone where there are none.

    Args:
        silence_s: a rank that gives no sign of life for so long is lost.
        lost: see `Presence`.

    Raises:
        CommunicationError: the store could not be reached.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        found = Presence(store, store, 0, 1, silence_s, lost)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            bound = timedelta(seconds=max(silence_s, MIN_START_S))
            shared, rank, size = next(iter(rendezvous("env://", timeout=bound)))
            store = _store_of_this_start(shared, rank, size)
            own = PrefixStore("presence", store.clone())
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise CommunicationError(f"rank {rank}: the {size} ranks did not meet at {where}: {error}") from error
        found = Presence(PrefixStore("presence", store), own, rank, size, silence_s, lost)
    try:
        yield found
    except BaseException as error:
        found.close(error)
        raise
    found.close(None)
