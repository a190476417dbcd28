"""The TP ranks of one HDP rank and their collectives: rows gathered where a block begins, summed where it ends.

A micro-batch of T tokens is padded at its end to T' rows, the next multiple of tp_size; rank t holds rows
[t T' / tp, (t + 1) T' / tp) of it between the blocks, whatever sequences lie there. Inside a block every rank has all
rows and a share of the weights, so its output is one term of a sum:

    gathered:  x_TE = the rows of all ranks,             backward: the sum of the ranks' gradients, own rows
    summed:    y_RE = own rows of the sum of all ranks,  backward: the gradients of all rows

Both backwards are the exact transposes, so a weight that every rank holds whole has a gradient that is a sum over the
ranks, and a weight that is split has its own. Invariant: the ranks of a group run the same micro-batches, so they call
in one order. Every call is bounded by the group and its error names the rank.

Shapes: T' rows of the micro-batch (padding included), R rows of this rank, X anything.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.runtime.p2p import collective
from bytescale.runtime.waits import Wait, WaitLog


class TensorGroup:
    """This rank among the TP ranks of its HDP rank.

    State is what was counted since `reset_counters`: `bytes_sent` and `waits`. A collective counts as a wait.

    Attributes:
        rank, size: position in and number of the TP ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._world_rank = dist.get_process_group_ranks(group)[self.rank]
        self._log = WaitLog(device)
        self.bytes_sent = 0

    def num_rows(self, num_tokens: int) -> int:
        """R: rows that each rank holds of a micro-batch of `num_tokens`."""
        return -(-num_tokens // self.size)

    def gather(self, x_RX: Tensor) -> Tensor:
        """The rows of all ranks, in order of rank."""
        whole = x_RX.new_empty(self.size * x_RX.shape[0], *x_RX.shape[1:])
        own = x_RX.contiguous()
        self._run("gather", dist.all_gather_single, whole, own, self.size - 1, own)
        return whole

    def sum_rows(self, x_TX: Tensor) -> Tensor:
        """Own rows of the sum over the ranks."""
        own = x_TX.new_empty(x_TX.shape[0] // self.size, *x_TX.shape[1:])
        self._run("sum", dist.reduce_scatter_single, own, x_TX.contiguous(), self.size - 1, own)
        return own

    def sum_(self, x_X: Tensor) -> Tensor:
        """Add up `x_X` over the ranks, in place."""
        with collective(self._world_rank, "a tensor-parallel all-reduce"):
            dist.all_reduce(x_X, group=self.group)
        return x_X

    def reset_counters(self) -> None:
        self.bytes_sent = 0
        self._log.reset()

    def next_operation(self) -> None:
        """Waits from here on count as those of another operation."""
        self._log.next_operation()

    def waits(self) -> list[Wait]:
        """Time in collectives since `reset_counters`, one entry for each operation that had any."""
        return self._log.waits()

    def _run(self, what: str, call: Any, output: Tensor, source: Tensor, peers: int, share: Tensor) -> None:
        self.bytes_sent += peers * share.numel() * share.element_size()
        begin = self._log.begin("tp")
        with collective(self._world_rank, f"a tensor-parallel {what}"):
            call(output, source, group=self.group)
        self._log.end("tp", begin)


def gathered(x_RX: Tensor, tp: TensorGroup) -> Tensor:
    """x_TX: the rows of all ranks. Its gradient is summed over them."""
    whole: Tensor = _Gather.apply(x_RX, tp)  # type: ignore[no-untyped-call]
    return whole


def summed(x_TX: Tensor, tp: TensorGroup) -> Tensor:
    """x_RX: own rows of the sum over the ranks. Its gradient is gathered."""
    own: Tensor = _Sum.apply(x_TX, tp)  # type: ignore[no-untyped-call]
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return tp.gather(x_RX)

    @staticmethod
    def backward(ctx: Any, dx_TX: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.sum_rows(dx_TX), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return tp.sum_rows(x_TX)

    @staticmethod
    def backward(ctx: Any, dx_RX: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.gather(dx_RX), None
