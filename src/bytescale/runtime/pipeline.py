"""One-forward-one-backward over the stages of a pipeline, each pipeline with its own number of micro-batches.

The order of operations comes from `bytescale.plan.order`, the same functions that validator and simulator use. A stage
receives a hidden state into a leaf that requires grad, runs, sends the detached output; in the backward it receives the
gradient of that output, calls `torch.autograd.backward`, and sends the gradient of the leaf. Shapes come from the plan,
none are exchanged.

Invariants: a send is never waited on before the next operation; opposite transfers with one neighbour (an output and
the gradient that comes back next, or a gradient and the next input) are posted as one exchange. Memory in flight is
bounded by the warm-up depth: pp_size - stage micro-batches, and what the longest unit of chunks adds.

Shapes: T rows of a micro-batch, E hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from bytescale.plan.order import BACKWARD, FORWARD
from bytescale.runtime.attention.ring import AttentionContext
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import Message, PeerToPeer, Transfer

Tensor = torch.Tensor


@dataclass(frozen=True)
class StageInput:
    """One micro-batch of this pipeline: its tokens, the attention context of this stage, what surrounds its forward."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    context: AttentionContext
    around_forward: AbstractContextManager[None] = field(default_factory=nullcontext)


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands in its pipeline.

    Attributes:
        stage, pp_size: position and number of stages.
        previous, following: ranks of the neighbours in the group of `pipe`; unused at the ends.
        pipe: P2P between stages; None without a pipeline.
        hidden_size, dtype: of the hidden states that travel.
    """

    stage: int
    pp_size: int
    previous: int
    following: int
    pipe: PeerToPeer | None
    hidden_size: int
    dtype: torch.dtype

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp_size - 1


Lap = Callable[[int, int], None]
"""Called after each operation with (micro_batch, FORWARD | BACKWARD)."""


def run_stage(
    model: LossModel,
    micro_batches: Sequence[StageInput],
    position: StagePosition,
    order: Sequence[tuple[int, int]],
    on_operation: Lap,
) -> Tensor:
    """Forward and backward of all micro-batches of this pipeline on this stage.

    Args:
        model: this stage.
        micro_batches: of this pipeline.
        position: where the stage stands.
        order: operations of this stage, from `bytescale.plan.order.rank_order`.
        on_operation: called after each.

    Returns:
        The summed loss of the targets on the last stage, 0 elsewhere; an fp64 scalar.
    """
    return _Stage(model, micro_batches, position).run(order, on_operation)


class _Stage:
    """The micro-batches in flight on one stage during one step."""

    def __init__(self, model: LossModel, micro_batches: Sequence[StageInput], position: StagePosition) -> None:
        self.model, self.micro_batches, self.position = model, micro_batches, position
        self.inbox: dict[tuple[int, int], tuple[Transfer, Tensor]] = {}
        self.in_flight: dict[int, tuple[Tensor, Tensor]] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)

    def run(self, order: Sequence[tuple[int, int]], on_operation: Lap) -> Tensor:
        for (number, direction), then in zip_longest(order, order[1:]):
            # A micro-batch without tokens on this rank has nothing to compute and nothing to send, on every stage.
            if self.micro_batches[number].context.work.num_tokens:
                if direction == FORWARD:
                    self._forward(number, then)
                else:
                    self._backward(number, then)
            on_operation(number, direction)
        if self.position.pipe is not None:
            self.position.pipe.drain()
        return self.loss_sum

    def _forward(self, number: int, then: tuple[int, int] | None) -> None:
        batch = self.micro_batches[number]
        if self.position.is_first:
            source = batch.input_ids_T
        else:
            source = self._take(number, FORWARD).requires_grad_()
        with batch.around_forward:
            output = self.model(source, batch.labels_T, batch.position_ids_T, batch.context)
        self.in_flight[number] = source, output
        if self.position.is_last:
            self.loss_sum += output.detach()
            return
        expected = then if then is not None and then[1] == BACKWARD else None
        self._send(number, FORWARD, output.detach()[0], expected)

    def _backward(self, number: int, then: tuple[int, int] | None) -> None:
        source, output = self.in_flight.pop(number)
        if self.position.is_last:
            output.backward()
        else:
            torch.autograd.backward(output, self._take(number, BACKWARD)[None])
        if self.position.is_first:
            return
        assert source.grad is not None
        expected = then if then is not None and then[1] == FORWARD else None
        self._send(number, BACKWARD, source.grad, expected)

    def _send(self, number: int, direction: int, tensor: Tensor, expected: tuple[int, int] | None) -> None:
        """Send to the neighbour in `direction`; receive in the same exchange what the next operation needs from it."""
        receives = []
        if expected is not None and self.micro_batches[expected[0]].context.work.num_tokens:
            receives = [expected]
        self._post([(number, direction, tensor)], receives)

    def _take(self, number: int, direction: int) -> Tensor:
        """The input of an operation: a hidden state for a forward, a gradient for a backward."""
        if (number, direction) not in self.inbox:
            self._post([], [(number, direction)])
        transfer, buffer = self.inbox.pop((number, direction))
        self._pipe.wait(transfer)
        return buffer

    @property
    def _pipe(self) -> PeerToPeer:
        assert self.position.pipe is not None
        return self.position.pipe

    def _post(self, sends: Sequence[tuple[int, int, Tensor]], receives: Sequence[tuple[int, int]]) -> None:
        outgoing = [
            Message(self._neighbour(direction, sending=True), tensor.contiguous(), _tag(number, direction))
            for number, direction, tensor in sends
        ]
        incoming = []
        for number, direction in receives:
            num_tokens = self.micro_batches[number].context.work.num_tokens
            buffer = torch.empty(
                (num_tokens, self.position.hidden_size), dtype=self.position.dtype, device=self.loss_sum.device
            )
            incoming.append(Message(self._neighbour(direction, sending=False), buffer, _tag(number, direction)))
        transfer = self._pipe.post("pipeline", outgoing, incoming)
        for key, message in zip(receives, incoming, strict=True):
            self.inbox[key] = transfer, message.tensor

    def _neighbour(self, direction: int, *, sending: bool) -> int:
        forwards = (direction == FORWARD) == sending
        return self.position.following if forwards else self.position.previous


def add_tied_gradients(model: LossModel, position: StagePosition, other_end: int) -> None:
    """Add up the gradients of an embedding and a head that share their weight but sit on different stages.

    Each end keeps its own copy, so both need the sum. Only the first and the last stage take part, shard by shard.

    Args:
        model: this stage, gradients reduced.
        position: where it stands.
        other_end: rank of the other end in the group of `position.pipe`.
    """
    pipe = position.pipe
    if pipe is None or not (position.is_first or position.is_last) or position.pp_size == 1:
        return
    gradient: Any = model.end_weight().grad
    own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    received = torch.empty_like(own)
    pipe.wait(
        pipe.post("tied gradient", [Message(other_end, own.clone(), _TIED)], [Message(other_end, received, _TIED)])
    )
    own += received
    pipe.drain()


_TIED = 1 << 30
"""Tag of the tied gradient, beyond that of any micro-batch."""


def _tag(number: int, direction: int) -> int:
    return 2 * number + direction
