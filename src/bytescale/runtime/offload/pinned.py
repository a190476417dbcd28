"""The CUDA tier: activations in pinned host memory, one stream out and one in. Has not run on a GPU yet.

Streams order everything, the host never waits: a copy out begins after the compute that made the tensor (event), its
storage is dropped only after the compute stream was made to wait for that copy, so the caching allocator may reuse it
at once; a copy in begins after its target is allocated, and compute waits for it before the first use. A pinned buffer
is reused only after the copy that emptied it. Pinning is slow, so buffers are kept, by size, which is a power of two:
torch pins that much whatever it is asked for.

Invariant: a storage and its pinned buffer outlive the copies that read them. Cost: events; the host waits for the
device only where a step that is over is read. Pinned memory stays at its largest use, at most `limit_bytes`.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytescale.runtime.clock import CudaMarker, Marker
from bytescale.runtime.offload.tiers import Copy, Direction, Partition, Range, Stash

_SMALLEST_BYTES = 1 << 20


@dataclass
class _Buffer:
    """Pinned bytes, and the event after which they may be written again."""

    data: Tensor
    free_after: Any = None


class PinnedTier:
    """Pinned host memory of at most `limit_bytes` for the tensors of one CUDA device."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device, self._limit_bytes = device, limit_bytes
        self.streams: dict[Direction, Any] = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}
        self._pinned_bytes = 0
        self._idle: dict[int, list[_Buffer]] = defaultdict(list)
        self._timed: list[tuple[Direction, Any, Any, int]] = []
        self.clock: Marker = CudaMarker(device)

    def begin_step(self) -> None:
        self._timed = []

    def engage(self) -> None:
        """Nothing to prepare."""

    def store(self, source: Tensor, partition: Partition) -> Stash | None:
        buffer = self._buffer(partition.leaving_bytes)
        return None if buffer is None else _PinnedStash(self, source, partition, buffer)

    def end_step(self) -> None:
        """Nothing to undo."""

    def copies(self) -> list[Copy]:
        for _, _, end, _ in self._timed:
            end.synchronize()
        self.clock.settle()
        return [
            Copy(direction, begin_ns / 1e9, (self.clock.at_ns(end) - begin_ns) / 1e9, num_bytes)
            for direction, begin, end, num_bytes in self._timed
            for begin_ns in [self.clock.at_ns(begin)]
        ]

    def close(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()
        self._idle.clear()

    def copy(self, direction: Direction, pairs: list[tuple[Tensor, Tensor]], after: Any, num_bytes: int) -> Any:
        """Copy (target, source) pairs on the stream of `direction` after the event `after`; returns the end event."""
        stream = self.streams[direction]
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end.record(stream)
        self._timed.append((direction, begin, end, num_bytes))
        return end

    def hold_compute(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def give_back(self, buffer: _Buffer, free_after: Any) -> None:
        buffer.free_after = free_after
        self._idle[buffer.data.numel()].append(buffer)

    def _buffer(self, num_bytes: int) -> _Buffer | None:
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        if self._idle[size]:
            buffer = self._idle[size].pop()
            self.streams["out"].wait_event(buffer.free_after)
            return buffer
        if self._pinned_bytes + size > self._limit_bytes:
            return None
        try:
            data = pinned(size)
        except RuntimeError:  # the host has no more to pin
            self._limit_bytes = self._pinned_bytes
            return None
        self._pinned_bytes += size
        return _Buffer(data)


def pinned(num_bytes: int) -> Tensor:
    """Bytes that stay where they are in memory, so that a device copies them by itself.

    Raises:
        RuntimeError: there are no more.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class _PinnedStash:
    def __init__(self, tier: PinnedTier, source: Tensor, partition: Partition, buffer: _Buffer) -> None:
        self._tier, self._partition, self._num_bytes = tier, partition, source.numel()
        self._buffer: _Buffer | None = buffer
        kept = torch.empty(partition.staying_bytes, dtype=torch.uint8, device=source.device)
        pairs = _pairs(buffer.data, source, partition.leaving) + _pairs(kept, source, partition.staying)
        self._kept: Tensor | None = kept
        self._out = tier.copy("out", pairs, tier.clock.mark(), partition.leaving_bytes)
        self._in: Any = None
        self._target: Tensor | None = None

    def settle(self) -> bool:
        self._tier.hold_compute(self._out)
        return True

    def recall(self) -> None:
        if self._in is not None:
            return
        assert self._buffer is not None and self._kept is not None
        target = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._kept.device)
        pairs = _pairs(self._buffer.data, target, self._partition.leaving)
        pairs += _pairs(self._kept, target, self._partition.staying)
        self._tier.streams["in"].wait_event(self._out)
        self._in = self._tier.copy(
            "in", [(whole, packed) for packed, whole in pairs], self._tier.clock.mark(), self._partition.leaving_bytes
        )
        self._target = target
        self._tier.give_back(self._buffer, self._in)
        self._buffer = None

    def take(self) -> Tensor:
        self.recall()
        assert self._target is not None
        self._tier.hold_compute(self._in)
        target, self._target, self._kept = self._target, None, None
        return target

    def discard(self) -> None:
        if self._buffer is not None:
            self._tier.hold_compute(self._out)
            self._tier.give_back(self._buffer, self._out)
            self._buffer = None
        elif self._target is not None:
            # Recalled and never used: its memory must not be handed out while the copy still writes it.
            self._tier.hold_compute(self._in)


def _pairs(packed: Tensor, whole: Tensor, ranges: tuple[Range, ...]) -> list[tuple[Tensor, Tensor]]:
    """(part of `packed`, part of `whole`) for each range."""
    pairs, done = [], 0
    for begin, end in ranges:
        pairs.append((packed[done : done + end - begin], whole[begin:end]))
        done += end - begin
    return pairs
