"""What a kernel is given and gives back: rows, the query side of a call, the interface of a back-end.

Shapes: T query rows, S key/value rows, P rows packed in block order, H query heads, G key/value heads, D head size.
q_THD, k_SGD, v_SGD; LSE is lse_TH, the natural log-sum-exp of the scaled scores, fp32 (fp64 for fp64).

A kernel computes a list of blocks (query rows x key/value rows), all full or all causal (causal blocks are square), and
returns results packed in block order. The backward takes the *final* output and LSE of the query rows, which is what
makes the blocks of a ring add up to the exact gradient.

Invariant: whatever follows from the blocks alone (row indices, lengths, bounds) is made once a micro-batch, on the
device, by `prepare`; a call makes no tensor from Python numbers and waits for no copy. Blocks are never empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bytescale.arrays import IntArray
from bytescale.runtime.attention.work import Block, Range


@dataclass(frozen=True)
class Rows:
    """Distinct rows of a tensor in a fixed order: a slice where they are consecutive, else an index on the device.

    Rows are distinct, so adding to them is deterministic on every device.
    """

    index: slice | Tensor
    num_rows: int

    @classmethod
    def of_ranges(cls, ranges: Sequence[Range], device: torch.device) -> "Rows":
        """The rows of `ranges`, one range after the other."""
        bounds = np.array([r for r in ranges if r[1] > r[0]], np.int64).reshape(-1, 2)
        if len(bounds) == 0:
            return cls(slice(0, 0), 0)
        if np.array_equal(bounds[1:, 0], bounds[:-1, 1]):
            return cls(slice(int(bounds[0, 0]), int(bounds[-1, 1])), int(bounds[-1, 1] - bounds[0, 0]))
        return cls.of_index(np.concatenate([np.arange(begin, end) for begin, end in bounds]), device)

    @classmethod
    def of_index(cls, index: IntArray, device: torch.device) -> "Rows":
        """The rows of `index` in its order."""
        if len(index) and np.array_equal(index, np.arange(index[0], index[0] + len(index))):
            return cls(slice(int(index[0]), int(index[0]) + len(index)), len(index))
        return cls(on_device(index, device), len(index))

    @property
    def are_consecutive(self) -> bool:
        """Whether `take` gives a view."""
        return isinstance(self.index, slice)

    def take(self, x_TX: Tensor) -> Tensor:
        """These rows of `x_TX`: a view where they are consecutive."""
        return x_TX[self.index] if isinstance(self.index, slice) else x_TX.index_select(0, self.index)

    def put(self, x_TX: Tensor, part_PX: Tensor) -> None:
        """Write these rows of `x_TX`, in place."""
        if isinstance(self.index, slice):
            x_TX[self.index] = part_PX
        else:
            x_TX.index_copy_(0, self.index, part_PX)

    def add(self, x_TX: Tensor, part_PX: Tensor) -> None:
        """Add to these rows of `x_TX`, in place and in its type."""
        if isinstance(self.index, slice):
            x_TX[self.index] += part_PX
        else:
            x_TX.index_add_(0, self.index, part_PX.to(x_TX.dtype))


def on_device(values: IntArray, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, without waiting for it."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


@dataclass(frozen=True)
class QuerySide:
    """What a backward knows of the query rows: q_THD, the final out_THD and lse_TH, and the gradient dout_THD."""

    q_THD: Tensor
    out_THD: Tensor
    lse_TH: Tensor
    dout_THD: Tensor


@dataclass(frozen=True)
class Call:
    """A list of blocks, prepared by a kernel.

    Attributes:
        q, kv: query rows and key/value rows in block order.
        causal: whether the blocks are causal, which all or none are.
        details: what else the kernel that made it needs.
    """

    q: Rows
    kv: Rows
    causal: bool
    details: Any = None


class AttentionKernel(Protocol):
    """The interface of a back-end; `device` is where the tensors of its calls live."""

    device: torch.device

    def prepare(self, blocks: Sequence[Block], *, causal: bool) -> Call:
        """What follows from the blocks alone; once a micro-batch."""
        ...

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """Returns (out_PHD, lse_PH), packed by query rows."""
        ...

    def backward(
        self, queries: QuerySide, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq_PHD, dk_PGD, dv_PGD), packed by query rows and by key/value rows."""
        ...


def query_ranges(blocks: Sequence[Block]) -> list[Range]:
    """The query rows of each block."""
    return [(b.q_begin, b.q_end) for b in blocks]


def kv_ranges(blocks: Sequence[Block]) -> list[Range]:
    """The key/value rows of each block."""
    return [(b.kv_begin, b.kv_end) for b in blocks]
