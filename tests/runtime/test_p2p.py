"""The link between ranks by itself: what lives how long, what errors name, how waits add up, what a stage may send."""

import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale.errors import CommunicationError
from bytescale.plan.order import FORWARD
from bytescale.runtime import waits
from bytescale.runtime.p2p import PeerToPeer
from bytescale.runtime.pipeline import _Stage
from bytescale.runtime.transport import Message
from bytescale.runtime.waits import WaitLog
from tests.plans import drawn
from tests.runtime.recorder import CPU, Program, Recording, recorded_world


def link_to_nobody() -> PeerToPeer:
    return PeerToPeer(None, 1.0, CPU, offsets=(), transport=Recording("attention", 0, (2, 3), []))


def test_what_is_sent_lives_until_it_is_drained() -> None:
    link, tensors = link_to_nobody(), [torch.zeros(3) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    while tensors:
        link.post("kv", [Message(1, tensors.pop(), 0)], [])
    gc.collect()
    assert all(reference() is not None for reference in alive)
    link.drain(keep=1)
    gc.collect()
    assert [reference() is not None for reference in alive] == [True, False, False]
    assert link.num_unfinished == 1 and link.bytes_sent == 36


class Deaf:
    """A transport whose peers never answer; rank 0 of the world ranks 2 and 3."""

    rank, world_ranks = 0, (2, 3)

    def exchange(self, sends: Any, receives: Any) -> Any:
        def wait(timeout: timedelta) -> None:
            raise RuntimeError("[gloo.cc:1] Timed out waiting. This is typically caused by a network")

        handle = SimpleNamespace(wait=wait)
        return [(handle, m.peer) for m in sends], [(handle, m.peer) for m in receives]


def test_errors_name_world_ranks() -> None:
    link = PeerToPeer(None, 1.0, CPU, offsets=(), transport=Deaf())
    message = Message(1, torch.zeros(1), 0)
    expected = r"^rank 2: kv transfer {} rank 3 failed after 0\.0 s \(bound 1 s\): Timed out waiting$"
    with pytest.raises(CommunicationError, match=expected.format("from")):
        link.wait(link.post("kv", [message], [message]))
    with pytest.raises(CommunicationError, match=expected.format("to")):
        link.drain()


class Event:
    """A CUDA event on a stream that never advances by itself; the host's record counter is its clock, in ms."""

    clock, made = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        Event.made += 1
        self.passed, self.at_ms = False, 0

    def record(self) -> None:
        Event.clock += 1
        self.passed, self.at_ms = False, Event.clock

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def test_waits_on_a_stream_add_up_per_operation_with_a_bounded_number_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    log = WaitLog(torch.device("cuda"))
    for _ in range(3):
        for _ in range(2_000):
            for what in ("kv", "dkv"):
                log.end(what, log.begin(what))
        log.next_operation()
    found = log.waits()
    assert [wait.what for wait in found] == ["kv", "dkv"] * 3
    assert [wait.duration_s for wait in found] == pytest.approx([2.0] * 6)
    assert Event.made <= 2 * waits.MAX_PENDING + 2
    log.reset()
    assert log.waits() == []


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            torch.zeros(5, 4, dtype=torch.bfloat16),
            r"type torch.bfloat16; its neighbour expects \(5, 4\)",
        ),
        (torch.zeros(4, 4), r"shape \(4, 4\)"),
    ],
)
def test_a_stage_sends_only_what_its_neighbour_expects(output: torch.Tensor, words: str) -> None:
    log: Program = []
    world = recorded_world(drawn("5", "0", pp_size=2), 0, log)
    model: Any = SimpleNamespace(
        compute_dtype=torch.float32,
        decoder=SimpleNamespace(config=SimpleNamespace(hidden_size=4)),
        num_rows=lambda num_tokens: num_tokens,
    )
    inputs: Any = [SimpleNamespace(num_tokens=5)]
    before = len(log)
    with pytest.raises(ValueError, match=rf"^stage 0 made hidden states of .*{words}"):
        _Stage(model, inputs, world)._send((0, FORWARD), output)
    assert log[before:] == []
