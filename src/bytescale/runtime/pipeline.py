"""One-forward-one-backward over the stages of a pipeline, each pipeline with its own number of micro-batches.

The order of operations comes from `bytescale.plan.order`, the same functions that validator and simulator use. A stage
receives a hidden state into a leaf that requires grad, runs, sends the detached output; in the backward it receives the
gradient of that output, calls `torch.autograd.backward`, and sends the gradient of the leaf. Shapes come from the plan,
none are exchanged.

Invariants: each direction has a communicator of its own, on which a stage posts single messages in the order of its
operations: receive, then send; so no message waits behind one of the other direction. What the next operation needs
from the other direction is received while this one computes. A send is never waited on before the next operation.
Memory in flight is bounded by the warm-up depth: pp_size - stage micro-batches, and what the longest unit of chunks
adds; buffers of sends live one operation longer.

Shapes: T rows of a micro-batch, R those of this TP rank, E hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bytescale.plan.order import BACKWARD, FORWARD, Operation
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import Transfer
from bytescale.runtime.transport import Message
from bytescale.runtime.world import World


@dataclass(frozen=True)
class StageInput:
    """One micro-batch of this pipeline: its tokens, the attention context of this stage, what surrounds its forward."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    context: AttentionContext
    around_forward: AbstractContextManager[None] = field(default_factory=nullcontext)

    @property
    def num_tokens(self) -> int:
        return self.context.work.num_tokens


def run_stage(
    model: LossModel,
    micro_batches: Sequence[StageInput],
    world: World,
    order: Sequence[Operation],
    on_operation: Callable[[int, int], None],
) -> Tensor:
    """Forward and backward of all micro-batches of this pipeline on this stage; forward alone if `order` says so.

    Args:
        model: this stage.
        micro_batches: of this pipeline.
        world: where the stage stands.
        order: operations of this stage, from `bytescale.plan.order`; without gradients those of the forward only.
        on_operation: called after each with (micro_batch, FORWARD | BACKWARD).

    Returns:
        The summed loss of the targets on the first TP rank of the last stage, 0 elsewhere; an fp64 scalar.
    """
    stage = _Stage(model, micro_batches, world)
    # A micro-batch without tokens on this rank has nothing to compute and nothing to send, on every stage.
    busy = [operation for operation in order if micro_batches[operation.micro_batch].num_tokens]
    following = dict(pairwise(busy))
    for operation in order:
        number, direction = operation
        if micro_batches[number].num_tokens:
            then = following.get(operation)
            if direction == FORWARD:
                stage.forward(number, then)
            else:
                stage.backward(number, then)
        for link in world.links:
            link.next_operation()
        on_operation(number, direction)
    for link in world.pipe:
        link.drain()
    return stage.loss_sum


class _Stage:
    """The micro-batches in flight on one stage during one step."""

    def __init__(self, model: LossModel, micro_batches: Sequence[StageInput], world: World) -> None:
        self.model, self.micro_batches, self.world = model, micro_batches, world
        self.inbox: dict[Operation, tuple[Transfer, Tensor]] = {}
        self.in_flight: dict[int, tuple[Tensor, Tensor]] = {}
        self.most_in_flight = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)

    def forward(self, number: int, then: Operation | None) -> None:
        """Run the forward of micro-batch `number`; `then` is the operation after it."""
        batch = self.micro_batches[number]
        source = batch.input_ids_T if self.world.is_first else self._take(Operation(number, FORWARD)).requires_grad_()
        self._expect(then, FORWARD)
        with batch.around_forward:
            output = self.model(source, batch.labels_T, batch.position_ids_T, batch.context)
        if torch.is_grad_enabled():
            self.in_flight[number] = source, output
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        if self.world.is_last:
            # The TP ranks of an HDP rank have the same loss, and it counts once.
            self.loss_sum += output.detach() if self.world.tp_rank == 0 else 0
        else:
            self._send(Operation(number, FORWARD), output.detach()[0])

    def backward(self, number: int, then: Operation | None) -> None:
        """Run the backward of micro-batch `number`; `then` is the operation after it."""
        source, output = self.in_flight.pop(number)
        gradient = None if self.world.is_last else self._take(Operation(number, BACKWARD))[None]
        self._expect(then, BACKWARD)
        torch.autograd.backward(output, gradient)
        if not self.world.is_first:
            assert source.grad is not None
            self._send(Operation(number, BACKWARD), source.grad)

    def _take(self, operation: Operation) -> Tensor:
        """The input of an operation: a hidden state for a forward, a gradient for a backward."""
        if operation not in self.inbox:
            self._receive(operation)
        transfer, buffer_RE = self.inbox.pop(operation)
        self.world.pipe[operation.direction].wait(transfer)
        return buffer_RE

    def _expect(self, then: Operation | None, direction: int) -> None:
        """Receive what the next operation needs while this one computes, if it comes from the other direction.

        From the same direction it must stay behind this operation's own output on their common communicator.
        """
        if then is None or then.direction == direction:
            return
        comes_from_here = self.world.is_first if then.direction == FORWARD else self.world.is_last
        if not comes_from_here:
            self._receive(then)

    def _receive(self, operation: Operation) -> None:
        number, direction = operation
        shape = self._shape(number)
        buffer_RE = torch.empty(shape, dtype=self.model.compute_dtype, device=self.world.device)
        message = Message(self.world.pipe_source(direction), buffer_RE, number)
        self.inbox[operation] = self.world.pipe[direction].post("pipeline", [], [message]), buffer_RE

    def _shape(self, number: int) -> tuple[int, int]:
        """Of the hidden states of a micro-batch that this rank passes on: [R, E]."""
        return self.model.num_rows(self.micro_batches[number].num_tokens), self.model.decoder.config.hidden_size

    def _send(self, operation: Operation, tensor_RE: Tensor) -> None:
        number, direction = operation
        expected = self._shape(number)
        if tensor_RE.shape != expected or tensor_RE.dtype != self.model.compute_dtype:
            raise ValueError(
                f"stage {self.world.stage} made hidden states of shape {tuple(tensor_RE.shape)} and type "
                f"{tensor_RE.dtype}; its neighbour expects {expected} and {self.model.compute_dtype}"
            )
        pipe = self.world.pipe[direction]
        # Older ones have arrived: the neighbour has answered them, or could not be where it is.
        pipe.drain(keep=self.most_in_flight + 1)
        pipe.post("pipeline", [Message(self.world.pipe_target(direction), tensor_RE.contiguous(), number)], [])


def add_tied_gradients(model: LossModel, world: World) -> None:
    """Add up the gradients of an embedding and a head that share their weight but sit on different stages.

    Each end keeps its own copy, so both need the sum. Only the first and the last stage take part, shard by shard: the
    last is before the first as the pipeline's groups count, around the world.

    Args:
        model: this stage, gradients reduced.
        world: where it stands.
    """
    if world.pp_size == 1 or not (world.is_first or world.is_last):
        return
    gradient: Any = model.end_weight().grad
    own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    received = torch.empty_like(own)
    there, back = (FORWARD, BACKWARD) if world.is_last else (BACKWARD, FORWARD)
    world.pipe[there].post("tied gradient", [Message(world.pipe_target(there), own.clone(), _TIED)], [])
    incoming = [Message(world.pipe_source(back), received, _TIED)]
    world.pipe[back].wait(world.pipe[back].post("tied gradient", [], incoming))
    own += received
    world.pipe[there].drain()


_TIED = 1 << 30
"""Tag of the tied gradient, beyond that of any micro-batch."""
