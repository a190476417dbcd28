"""Ranks that know of each other: waiting for one that prepares, hearing of one that failed, missing one that is silent.

Ranks are threads of this process around one store. Nothing waits for its bound but the tests of silence, whose bound is
short; the ones where nobody may be missed have a bound that no busy machine reaches.
"""

import os
import threading
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bytescale.errors import CommunicationError
from bytescale.runtime import presence as module
from bytescale.runtime import world as world_module
from bytescale.runtime.presence import Presence
from bytescale.runtime.world import open_world

pytestmark = pytest.mark.timeout(30)
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NEVER_S, SOON_S = 1000.0, 0.4


class Run:
    """Ranks around one store; `lost[rank]` receives what ends a rank from its thread."""

    def __init__(self, size: int, silence_s: float = NEVER_S) -> None:
        self.store, self.size, self.silence_s = dist.HashStore(), size, silence_s
        self.lost: list[Queue[CommunicationError]] = [Queue() for _ in range(size)]
        self.started: list[Presence] = []

    def rank(self, number: int) -> Presence:
        self.started.append(Presence(self.store, self.store, number, self.size, self.silence_s, self.lost[number].put))
        return self.started[-1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "FIRST_WORD_S", 0.1)
    monkeypatch.setattr(module, "NEXT_WORD_S", 0.1)


@pytest.mark.usefixtures("quick")
def test_a_rank_that_prepares_is_waited_for_and_named() -> None:
    run, said = Run(3), Queue[str]()
    ranks = [run.rank(number) for number in range(3)]
    ranks[1].doing("prepares data")
    ready = [threading.Thread(target=ranks[n].wait_for_all, args=(said.put,)) for n in (0, 2)]
    for thread in ready:
        thread.start()
    lines = [said.get() for _ in range(2)]
    while "rank 1" in lines[-1] and "rank 2" in lines[-1]:
        lines.append(said.get())
    assert lines[-1].startswith("waiting for rank 1 on ")
    assert lines[-1].endswith(", which prepares data (0 s so far)")
    ranks[1].wait_for_all(said.put)
    for thread in ready:
        thread.join()
    for rank in ranks:
        rank.close(None)
    assert all(lost.empty() for lost in run.lost)


@pytest.mark.usefixtures("quick")
def test_a_rank_that_never_starts_is_missed() -> None:
    run, said = Run(3, SOON_S), Queue[str]()
    ranks = [run.rank(number) for number in (0, 1)]
    with pytest.raises(CommunicationError, match=r"^rank 0: rank 2 has given no sign of life for \d+ s$"):
        ranks[0].wait_for_all(said.put)
    assert said.get().endswith("rank 2, which has not started")
    assert "rank 1: rank 2 has given no sign of life" in str(run.lost[1].get())


@pytest.mark.usefixtures("quick")
def test_a_rank_that_fails_ends_the_others_and_says_why() -> None:
    run = Run(4)
    ranks = [run.rank(number) for number in range(4)]
    ranks[2].close(ValueError("line 3 of x.txt\nis broken"))
    with pytest.raises(CommunicationError, match=r"^rank 0: rank 2 failed: line 3 of x.txt is broken$"):
        ranks[0].wait_for_all(lambda line: None)
    ranks[0].close(CommunicationError("lost its peer"))
    for number in (1, 3):
        assert str(run.lost[number].get()) == f"rank {number}: rank 2 failed: line 3 of x.txt is broken"
    assert run.lost[2].empty() and run.lost[0].empty()


@pytest.mark.usefixtures("quick")
def test_a_rank_that_is_done_is_not_missed() -> None:
    run = Run(2, SOON_S)
    ranks = [run.rank(number) for number in range(2)]
    ranks[1].close(None)
    with pytest.raises(Empty):
        run.lost[0].get(timeout=2 * SOON_S)
    ranks[0].close(None)


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_gone_ends_a_rank_that_still_needs_it() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            if gone.is_set():
                raise RuntimeError("connection reset")
            return getattr(run.store, name)

    run, gone, lost = Run(2, SOON_S), threading.Event(), Queue[CommunicationError]()
    there: Any = Gone()
    rank = Presence(there, there, 0, 2, SOON_S, lost.put)
    run.rank(1)
    gone.set()
    assert "rank 0: the store where ranks meet has not answered for" in str(lost.get())
    rank.close(None)


@pytest.mark.usefixtures("quick")
def test_waits_that_never_raise_and_a_destroy_that_waits_end_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group as NCCL's: waits order streams, destroying it flushes what is under way, for ever when a peer is gone."""
    flushed = threading.Event()
    group = SimpleNamespace(wait=threading.Event().wait)
    monkeypatch.setattr(world_module.dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(world_module.dist, "destroy_process_group", flushed.wait)
    monkeypatch.setattr(world_module, "join_groups", lambda *args: group)
    run = Run(2)
    failing, waiting = run.rank(0), run.rank(1)

    def fail() -> None:
        with pytest.raises(torch.OutOfMemoryError), open_world(failing, 1.0):
            raise torch.OutOfMemoryError("out of memory")
        failing.close(torch.OutOfMemoryError("out of memory"))

    def wait() -> None:
        with open_world(waiting, 1.0) as world:
            world.wait()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=target, daemon=True) for target in (fail, wait)]
    for thread in threads:
        thread.start()
    assert str(run.lost[1].get()) == "rank 1: rank 0 failed: out of memory"
    threads[0].join()
    assert not flushed.is_set() and threads[1].is_alive()


def test_a_rank_on_a_gpu_has_a_queue_for_every_stream_before_its_context_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, object] = {}

    def init(backend: str, **options: object) -> None:
        made["backend"] = backend

    monkeypatch.setenv(QUEUES, "to be restored")
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update(queues=os.environ[QUEUES]))
    monkeypatch.setattr(world_module.dist, "init_process_group", init)
    monkeypatch.setattr(world_module.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(world_module, "join_groups", lambda *args: None)
    with open_world(Run(1).rank(0), 1.0, device_type="cuda"):
        # Numbers and objects travel between CPUs.
        assert made == {"queues": "32", "backend": "cpu:gloo,cuda:nccl"}
