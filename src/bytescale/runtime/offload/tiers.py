"""What leaves the device, and what a tier that takes it can do: row ranges, byte ranges, the interface.

A tier takes the bytes of a storage apart by a `Partition` (ranges that leave, ranges that stay), lets the caller drop
the storage once the leaving bytes are out, and builds an equal storage when they are wanted back. One worker moves
bytes out, another brings them in, so both directions run at once (paper, section 3.1); each is one track of the trace.

Invariants: bytes come back exactly; a tier without room, or whose write failed, says so and the storage stays: nothing
but a failed read, which loses data, is an error. Cost: one copy of the leaving bytes each way, one of the staying ones,
which need storage of their own, since a view would keep all of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from bytescale.runtime.clock import Marker

Range = tuple[int, int]
Direction = Literal["out", "in"]


class OffloadError(RuntimeError):
    """Activations that had left could not be brought back; the step is lost."""


@dataclass(frozen=True)
class Partition:
    """Byte ranges of a storage that leave and that stay: ascending, disjoint, together the whole storage."""

    leaving: tuple[Range, ...]
    staying: tuple[Range, ...]

    @property
    def leaving_bytes(self) -> int:
        return sum(end - begin for begin, end in self.leaving)

    @property
    def staying_bytes(self) -> int:
        return sum(end - begin for begin, end in self.staying)


@dataclass(frozen=True)
class Copy:
    """One finished transfer. `begin_s` counts as `perf_counter`."""

    direction: Direction
    begin_s: float
    duration_s: float
    num_bytes: int


class Stash(Protocol):
    """One storage that leaves. Call order: `settle`, `recall`, `take`; `discard` at the end, whatever was called."""

    def settle(self) -> bool:
        """Wait until the storage may be dropped; False when it must be kept because its bytes did not get out."""
        ...

    def recall(self) -> None:
        """Start bringing the bytes back."""
        ...

    def take(self) -> Tensor:
        """The storage's bytes in a new uint8 tensor; waits for them."""
        ...

    def discard(self) -> None:
        """Give the room back."""
        ...


class Tier(Protocol):
    """A place for offloaded bytes. `clock` notes points in time on the compute side."""

    clock: Marker

    def begin_step(self) -> None:
        """Start counting copies from zero."""
        ...

    def engage(self) -> None:
        """Before the first tensor of a micro-batch leaves; `end_step` ends it."""
        ...

    def store(self, source: Tensor, partition: Partition) -> Stash | None:
        """Start moving `source` (uint8, a whole storage) out; None when there is no room."""
        ...

    def end_step(self) -> None:
        """Nothing leaves any more until the next step. Does not wait for a device."""
        ...

    def copies(self) -> list[Copy]:
        """Every copy since `begin_step`; waits for those under way and settles the clock."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True)
class LeavingRows:
    """Which rows of a micro-batch of `num_tokens` leave: ascending, disjoint, not touching."""

    num_tokens: int
    rows: tuple[Range, ...]

    @property
    def share(self) -> float:
        return sum(end - begin for begin, end in self.rows) / max(1, self.num_tokens)


def leaving_rows(tokens: Sequence[int], offload_ratio: Sequence[float]) -> LeavingRows:
    """The first ceil(r * n) rows of every piece, given in the order in which they lie in the micro-batch."""
    rows: list[Range] = []
    begin = 0
    for num, ratio in zip(tokens, offload_ratio, strict=True):
        # Rounded up, so that no more stays than the memory rule counts.
        end = begin + math.ceil(float(ratio) * int(num) - 1e-9)
        if rows and rows[-1][1] == begin and end > begin:
            rows[-1] = (rows[-1][0], end)
        elif end > begin:
            rows.append((begin, end))
        begin += int(num)
    return LeavingRows(begin, tuple(rows))


def partition(tensor: Tensor, leaving: LeavingRows) -> Partition:
    """Which bytes of the storage of `tensor` leave.

    The dimension of `num_tokens` entries cuts the storage into [outer, num_tokens, inner] whatever the order of the
    dimensions; a storage without such a dimension gives its first bytes in the same share. Any cut is exact.
    """
    num_bytes = tensor.untyped_storage().nbytes()
    num_tokens, rows, inner = leaving.num_tokens, leaving.rows, 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == num_tokens and stride > 0 and num_bytes % (size * stride * tensor.element_size()) == 0:
            inner = stride * tensor.element_size()
            break
    if not inner:
        return _partition([(0, int(leaving.share * num_bytes))], num_bytes)
    slab = num_tokens * inner
    slabs = range(0, num_bytes, slab)
    return _partition([(at + begin * inner, at + end * inner) for at in slabs for begin, end in rows], num_bytes)


def _partition(ranges: list[Range], num_bytes: int) -> Partition:
    leaving: list[Range] = []
    staying: list[Range] = []
    done = 0
    for begin, end in ranges:
        if begin > done:
            staying.append((done, begin))
        if end > begin:
            if leaving and leaving[-1][1] == begin:
                leaving[-1] = (leaving[-1][0], end)
            else:
                leaving.append((begin, end))
        done = max(done, end)
    if done < num_bytes:
        staying.append((done, num_bytes))
    return Partition(tuple(leaving), tuple(staying))
