"""What attention is told of a micro-batch: its work, with every row index and kernel call made once, on the device.

`bytescale.runtime.attention.work` says in ranges who needs what; here the ranges become slices or index tensors, and
lists of blocks become prepared kernel calls. Every layer, direction and recomputation of the micro-batch uses the same.

Invariant: the query rows of one call are distinct, so merging and adding are index operations in a fixed order. Cost:
numpy over the pieces and a few small copies to the device, once a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bytescale.runtime.attention.interface import AttentionKernel, Call, Rows
from bytescale.runtime.attention.kept_kv import KeptKv
from bytescale.runtime.attention.work import AttentionWork, Block, Parcel, RingStep
from bytescale.runtime.p2p import PeerToPeer


@dataclass(frozen=True)
class Part:
    """Rows [begin, end) of a packed buffer that go to or come from `peer` in one message."""

    peer: int
    begin: int
    end: int


@dataclass(frozen=True)
class StepCalls:
    """Ring step j of a micro-batch.

    Attributes:
        sent: rows of the source buffer that leave, packed parcel by parcel.
        sends, receives: how the packed buffers of both directions are cut into messages.
        num_received: rows of the receive buffer.
        calls: kernel calls on the received rows; two or more only where a query row meets several blocks.
    """

    sent: Rows
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    num_received: int
    calls: tuple[Call, ...]


class AttentionContext:
    """What attention needs to know of a micro-batch; goes through the model's forward as `attention_context`.

    A plain class on purpose: FSDP2 walks through every dataclass and container among the arguments of a module and
    rebuilds it, in every layer of every call.

    Attributes:
        work: what is exchanged and computed.
        kernel: computes blocks.
        comm: exchanges with other ranks.
        max_context: longest sequence that is to come; a layer that asks for a shorter window is refused.
        kept: keys and values of earlier chunks; None where the plan has none.
        local, early_causal, early_full, late_causal, kept_blocks: calls of the lists of the same names in `work`; None
            for an empty list.
        steps: ring steps 1, 2, ...
    """

    __slots__ = (
        "comm",
        "early_causal",
        "early_full",
        "kept",
        "kept_blocks",
        "kernel",
        "late_causal",
        "local",
        "max_context",
        "steps",
        "work",
    )

    def __init__(
        self,
        work: AttentionWork,
        kernel: AttentionKernel,
        comm: PeerToPeer,
        max_context: int = 0,
        kept: KeptKv | None = None,
    ) -> None:
        self.work, self.kernel, self.comm = work, kernel, comm
        self.max_context, self.kept = max_context, kept
        self.local = _call(kernel, work.local, causal=True)
        self.kept_blocks = _call(kernel, work.kept_blocks, causal=False)
        self.steps = tuple(_step_calls(kernel, step) for step in work.steps)
        self.early_causal = self.early_full = self.late_causal = None
        if self.exchanges:
            self.early_causal = _call(kernel, work.early_causal, causal=True)
            self.early_full = _call(kernel, work.early_full, causal=False)
            self.late_causal = _call(kernel, work.late_causal, causal=True)

    @property
    def exchanges(self) -> bool:
        """Whether anything comes from or goes to outside the micro-batch: other ranks, or other chunks."""
        return bool(self.work.steps or self.work.kept or self.work.stored)

    @property
    def kept_kv(self) -> KeptKv:
        """The kept keys and values of a micro-batch that needs them."""
        assert self.kept is not None, "a micro-batch with chunks needs a place to keep keys and values"
        return self.kept


def _call(kernel: AttentionKernel, blocks: Sequence[Block], *, causal: bool) -> Call | None:
    return kernel.prepare(blocks, causal=causal) if blocks else None


def _step_calls(kernel: AttentionKernel, step: RingStep) -> StepCalls:
    return StepCalls(
        sent=Rows.of_ranges([r for parcel in step.sends for r in parcel.ranges], kernel.device),
        sends=_parts(step.sends),
        receives=_parts(step.receives),
        num_received=step.num_received_tokens,
        calls=tuple(kernel.prepare(blocks, causal=False) for blocks in _distinct_queries(step.blocks)),
    )


def _parts(parcels: Sequence[Parcel]) -> tuple[Part, ...]:
    parts, begin = [], 0
    for parcel in parcels:
        parts.append(Part(parcel.peer, begin, begin + parcel.num_tokens))
        begin = parts[-1].end
    return tuple(parts)


def _distinct_queries(blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks as few lists in which no query row occurs twice, in order.

    All blocks of a sequence in one ring step end at its last query row here, so that row tells them apart.
    """
    lists: list[list[Block]] = []
    occurrences: dict[int, int] = {}
    for block in blocks:
        number = occurrences.get(block.q_end, 0)
        occurrences[block.q_end] = number + 1
        if number == len(lists):
            lists.append([])
        lists[number].append(block)
    return lists
