"""The CUDA tier on a stand-in for a device that runs as late as events allow; compute is this process."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bytescale.runtime.offload import pinned
from bytescale.runtime.offload.offloader import Offloader
from bytescale.runtime.offload.pinned import PinnedTier
from bytescale.runtime.offload.tiers import Partition
from tests.runtime.test_offload import Layers, check_equal, gradients_of


class Device:
    """Its clock and its streams. A side stream does nothing before someone waits for an event on it."""

    def __init__(self) -> None:
        self.now = 0
        self.host_waits = 0
        self.compute = Stream(self)
        self.current = self.compute


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.queue = device, deque[Any]()

    def wait_event(self, event: "Event") -> None:
        if self is self.device.compute:
            event.reach()
        else:
            self.queue.append(event.reach)

    def synchronize(self) -> None:
        self.device.host_waits += 1
        while self.queue:
            self.queue.popleft()()


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.stream, self.at = device, device.compute, -1

    def record(self, stream: Stream) -> None:
        self.stream = stream
        if stream is self.device.compute:
            self._pass()
        else:
            stream.queue.append(self._pass)

    def _pass(self) -> None:
        self.device.now += 1
        self.at = self.device.now

    def reach(self) -> None:
        while self.at < 0:
            self.stream.queue.popleft()()

    def synchronize(self) -> None:
        self.device.host_waits += 1
        self.reach()

    def elapsed_time(self, end: "Event") -> float:
        assert min(self.at, end.at) > 0, "read before the device got there"
        return float(end.at - self.at)


class Late(TorchFunctionMode):
    """Puts copies on a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        target, source = (x.detach() for x in args)
        self.stream.queue.append(lambda: target.copy_(source))
        return target


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, made.current = made.current, chosen
        with Late(chosen):
            yield
        made.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("the whole device is waited for"))
    monkeypatch.setattr(pinned, "pinned", lambda num_bytes: torch.full((num_bytes,), 255, dtype=torch.uint8))
    return made


def exponentials(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden.exp() * 1e-3) @ weight


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_whatever_the_device_delays_the_gradients_are_the_same(device: Device, ratio: float) -> None:
    tier = PinnedTier(torch.device("cpu"), 1 << 30)
    model = Layers(6, exponentials)
    for _ in range(3):
        report = check_equal(model, tier, [40], [ratio])
        assert report.bytes_in == report.bytes_out > 0 == report.declined_bytes
        assert all(copy.duration_s > 0 for copy in report.copies)
    tier.close()


def test_a_buffer_waits_for_the_copy_that_empties_it(device: Device) -> None:
    tier = PinnedTier(torch.device("cpu"), 1 << 20)
    whole = Partition(((0, 1 << 20),), ())
    sources = [torch.full((1 << 20,), value, dtype=torch.uint8) for value in (1, 2)]
    first = tier.store(sources[0], whole)
    assert first is not None
    first.recall()  # its buffer is given on, though nothing has moved yet
    second = tier.store(sources[1], whole)
    assert second is not None and second.settle()
    assert torch.equal(first.take(), sources[0]) and torch.equal(second.take(), sources[1])
    third = tier.store(sources[0], whole)
    assert third is not None and torch.equal(third.take(), sources[0])


def test_the_host_waits_only_where_a_step_is_read(device: Device) -> None:
    tier = PinnedTier(torch.device("cpu"), 1 << 30)
    model = Layers(6, exponentials)
    offloader = Offloader(model, lambda: tier, 1024)  # type: ignore[arg-type]
    for _ in range(2):
        device.host_waits = 0
        gradients_of(model, offloader, [40], [1.0])
        offloader.end_step()
        assert device.host_waits == 0
        report = offloader.report()
        assert device.host_waits > 0 and len(report.copies) > 0
        assert report.exposed_s == pytest.approx(sum(duration_s for _, duration_s in report.waits))
    offloader.close()


def test_what_is_pinned_counts_as_torch_pins_it(device: Device) -> None:
    """Powers of two, at least a MiB; a buffer is used again."""
    tier = PinnedTier(torch.device("cpu"), 9 << 20)
    source = torch.zeros(5 << 20, dtype=torch.uint8)
    whole = Partition(((0, source.numel()),), ())
    first = tier.store(source, whole)
    assert first is not None and tier.store(source, whole) is None
    first.discard()
    assert tier.store(source, whole) is not None
