"""The TP ranks of one HDP rank and their collectives: rows gathered where a block begins, summed where it ends.

A micro-batch of T tokens is padded at its end to T' rows, the next multiple of tp_size; rank t holds rows
[t T' / tp, (t + 1) T' / tp) of it between the blocks, whatever sequences lie there. Inside a block every rank has all
rows and a share of the weights, so its output is one term of a sum:

    gathered:  x_TE = the rows of all ranks,             backward: the sum of the ranks' gradients, own rows
    summed:    y_RE = own rows of the sum of all ranks,  backward: the gradients of all rows

Both backwards are the exact transposes, so a weight that every rank holds whole has a gradient that is a sum over the
ranks, and a weight that is split has its own. Invariant: the ranks of a group run the same micro-batches, so they call
in one order. Every call is bounded by the group and its error names the rank. Cost: a block with its gradients moves
the hidden states of all rows five times, and keeps own rows of its input alone (`BlockInput`).

Shapes: T' rows of the micro-batch (padding included), R rows of this rank, X anything.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.runtime.p2p import collective
from bytescale.runtime.waits import Wait, WaitLog

COMPUTING, REDUCING = "tp", "tp reduce"
"""Kinds of waits."""


class TensorGroup:
    """This rank among the TP ranks of its HDP rank.

    State is what was counted since `reset_counters`: `bytes_sent` and `waits`. A collective counts as a wait, of kind
    `tp`, or `tp reduce` once the reduction has begun.

    Attributes:
        rank, size: position in and number of the TP ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._world_rank = dist.get_process_group_ranks(group)[self.rank]
        self._log = WaitLog(device)
        self._kind = COMPUTING
        self.bytes_sent = 0

    def num_rows(self, num_tokens: int) -> int:
        """R: rows that each rank holds of a micro-batch of `num_tokens`."""
        return -(-num_tokens // self.size)

    def gather(self, x_RX: Tensor) -> Tensor:
        """The rows of all ranks, in order of rank."""
        return self.finish(self.start_gather(x_RX))

    def start_gather(self, x_RX: Tensor) -> "Collective":
        """Begin to gather the rows of all ranks; `finish` returns them."""
        whole_TX = x_RX.new_empty(self.size * x_RX.shape[0], *x_RX.shape[1:])
        own_RX = x_RX.contiguous()
        return self._start(dist.all_gather_single, whole_TX, own_RX, own_RX)

    def sum_rows(self, x_TX: Tensor) -> Tensor:
        """Own rows of the sum over the ranks."""
        own_RX = x_TX.new_empty(x_TX.shape[0] // self.size, *x_TX.shape[1:])
        return self.finish(self._start(dist.reduce_scatter_single, own_RX, x_TX.contiguous(), own_RX))

    def finish(self, collective_: "Collective") -> Tensor:
        """What a collective gives; blocks the host, or on CUDA the stream, until it is there."""
        begin = self._log.begin(self._kind)
        with collective(self._world_rank, "a tensor-parallel exchange"):
            collective_.work.wait()
        self._log.end(self._kind, begin)
        return collective_.output

    def sum_(self, x_X: Tensor) -> Tensor:
        """Add up `x_X` over the ranks, in place."""
        with collective(self._world_rank, "a tensor-parallel all-reduce"):
            dist.all_reduce(x_X, group=self.group)
        return x_X

    def reset_counters(self) -> None:
        self.bytes_sent, self._kind = 0, COMPUTING
        self._log.reset()

    def begin_reduction(self) -> None:
        """What follows is no part of the compute phase: ranks come to it when they are done."""
        self._kind = REDUCING

    def next_operation(self) -> None:
        """Waits from here on count as those of another operation."""
        self._log.next_operation()

    def waits(self) -> list[Wait]:
        """Time in collectives since `reset_counters`, one entry for each operation that had any."""
        return self._log.waits()

    def _start(self, call: Any, output: Tensor, source: Tensor, share: Tensor) -> "Collective":
        self.bytes_sent += (self.size - 1) * share.numel() * share.element_size()
        with collective(self._world_rank, "a tensor-parallel exchange"):
            return Collective(call(output, source, group=self.group, async_op=True), output, source)


class Collective(NamedTuple):
    """An exchange under way: its handle, where the result will be, and what must live as long."""

    work: Any
    output: Tensor
    source: Tensor


class BlockInput:
    """The input of a block: rows of all ranks in the forward, not kept, and gathered again for the backward.

    The second gathering begins with the backward of the block, and travels while that goes from the output to the
    layers that need the input. Between, own rows are kept, by autograd as any other tensor.

    Attributes:
        whole_TE: the input in the forward.
        num_users: layers whose backward needs it.
    """

    def __init__(self, tp: TensorGroup) -> None:
        self.whole_TE: Tensor | None = None
        self.num_users = 0
        self._tp = tp
        self._node: Any = None
        self._again: Collective | None = None

    def keep(self, node: Any, x_RE: Tensor) -> None:
        """Let the autograd `node` keep own rows."""
        node.save_for_backward(x_RE)
        self._node = node

    def start(self) -> None:
        """The backward of the block begins."""
        if self.num_users:
            self._again = self._tp.start_gather(*self._node.saved_tensors)

    def take(self) -> Tensor:
        """x_TE for the backward of one user; the last one lets go of it."""
        assert self._again is not None, "the backward of a block begins at its output"
        if self._again.work is not None:
            self._again = self._again._replace(output=self._tp.finish(self._again), work=None)
        whole_TE = self._again.output
        self.num_users -= 1
        if not self.num_users:
            self._again = None
        return whole_TE


def gathered(x_RX: Tensor, tp: TensorGroup, kept_by: BlockInput | None = None) -> Tensor:
    """x_TX: the rows of all ranks. Its gradient is summed over them. `kept_by` keeps own rows for the backward."""
    whole_TX: Tensor = _Gather.apply(x_RX, tp, kept_by)  # type: ignore[no-untyped-call]
    return whole_TX


def summed(x_TX: Tensor, tp: TensorGroup, begins: BlockInput | None = None) -> Tensor:
    """x_RX: own rows of the sum over the ranks. Its gradient is gathered, and the backward of a block `begins`."""
    own_RX: Tensor = _Sum.apply(x_TX, tp, begins)  # type: ignore[no-untyped-call]
    return own_RX


def gathered_linear(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, block: BlockInput) -> Tensor:
    """A linear layer on the input of a block, which is not kept for its backward."""
    block.num_users += 1
    y_TF: Tensor = _GatheredLinear.apply(x_TE, weight_FE, bias_F, block)  # type: ignore[no-untyped-call]
    return y_TF


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, tp: TensorGroup, kept_by: BlockInput | None) -> Tensor:
        ctx.tp = tp
        if kept_by is not None:
            kept_by.keep(ctx, x_RX)
        return tp.gather(x_RX)

    @staticmethod
    def backward(ctx: Any, dx_TX: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tp.sum_rows(dx_TX), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, tp: TensorGroup, begins: BlockInput | None) -> Tensor:
        ctx.tp, ctx.begins = tp, begins
        return tp.sum_rows(x_TX)

    @staticmethod
    def backward(ctx: Any, dx_RX: Tensor) -> tuple[Tensor, None, None]:
        dx_TX = ctx.tp.gather(dx_RX)
        if ctx.begins is not None:
            ctx.begins.start()
        return dx_TX, None, None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, block: BlockInput) -> Tensor:
        ctx.save_for_backward(weight_FE)
        ctx.block = block
        return torch.nn.functional.linear(x_TE, weight_FE, bias_F)

    @staticmethod
    def backward(ctx: Any, dy_1TF: Tensor) -> tuple[Tensor | None, ...]:
        (weight_FE,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_TE, dy_TF = ctx.block.take(), dy_1TF.flatten(0, -2)
        return (
            dy_1TF @ weight_FE if needs_input else None,
            dy_TF.T @ x_TE if needs_weight else None,
            dy_TF.sum(0) if needs_bias else None,
            None,
        )
