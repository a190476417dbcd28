"""Distributed attention: one autograd function per micro-batch and layer around all of its rings.

Shapes: T rows of the micro-batch, S rows of the source buffer, R rows of a receive buffer, H query heads, G key/value
heads, D head size.

Forward, with (O_a, L_a) the output and log-sum-exp of the keys seen so far and (O_b, L_b) those of one more block:

    L = log(exp(L_a) + exp(L_b)),    O = O_a + sigmoid(L_b - L_a) * (O_b - O_a)

Every query row sees itself in the local block, which comes first, so L_a is always finite. Backward: with the final
O and L, the kernel's backward on each (query rows, key rows) block gives terms that add up to the exact dq, dk, dv.

Accumulators are fp32 (fp64 for fp64). Ring step j + 1 travels while step j is computed. In the backward a partial dKV
travels while the next step is computed, and the last one while (back queries x back keys) of the local block is.
KV are sent again in the backward rather than kept: memory stays that of one piece.

A chunk of a sequence also attends to the keys and values kept of its earlier chunks (`kept_kv`), which
follow the micro-batch's own in the source buffer: k_SGD below, S >= T rows.

Invariant: results depend on the sequences alone, not on what else is packed beside them; gradients are summed in a
fixed order, so a run repeats bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bytescale.runtime.attention.kept_kv import KeptKv
from bytescale.runtime.attention.kernels import AttentionKernel
from bytescale.runtime.attention.work import AttentionWork, Block, Parcel, RingStep
from bytescale.runtime.p2p import PeerToPeer, Transfer
from bytescale.runtime.transport import Message


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
    """

    __slots__ = ("comm", "kept", "kernel", "max_context", "work")

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


def distributed_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, context: AttentionContext, scale: float, layer: int = 0
) -> Tensor:
    """Causal attention of every sequence of the micro-batch over all ranks that hold a piece of it.

    Args:
        q_THD, k_TGD, v_TGD: rows of this rank in the order of the micro-batch, rotary positions applied.
        context: the micro-batch; all members of its gang must call in the same order.
        scale: softmax scale.
        layer: number of the layer on this stage, under which chunks keep their keys and values.

    Returns:
        out_THD for the rows of this rank.
    """
    if q_THD.shape[0] != context.work.num_tokens:
        raise ValueError(f"micro-batch has {context.work.num_tokens} tokens, attention was given {q_THD.shape[0]}")
    out: Tensor = _RingAttention.apply(q_THD, k_TGD, v_TGD, context, scale, layer)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, context: AttentionContext, scale: float, layer: int
    ) -> Tensor:
        for rows in context.work.stored:
            kept_of(context).put(layer, rows, k_TGD, v_TGD)
        k_SGD, v_SGD = _source(k_TGD, v_TGD, context, layer)
        out_THD, lse_TH = _forward(q_THD, k_SGD, v_SGD, context, scale)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_TH)
        ctx.context, ctx.scale, ctx.layer = context, scale, layer
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_TH = ctx.saved_tensors
        context, num_tokens = ctx.context, k_TGD.shape[0]
        k_SGD, v_SGD = _source(k_TGD, v_TGD, context, ctx.layer)
        run = _Backward(dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_TH, context, ctx.scale).run
        dq_THD, dk_SGD, dv_SGD = run()
        for rows in context.work.kept:
            kept_of(context).add_gradients(ctx.layer, rows, dk_SGD, dv_SGD)
        for rows in context.work.stored:
            if (later := kept_of(context).take_gradients(ctx.layer, rows)) is not None:
                dk_SGD[rows.begin : rows.end] += later[0]
                dv_SGD[rows.begin : rows.end] += later[1]
        own = (x_SGD[:num_tokens].to(k_TGD.dtype) for x_SGD in (dk_SGD, dv_SGD))
        return (dq_THD, *own, None, None, None)


def kept_of(context: AttentionContext) -> KeptKv:
    """The kept keys and values of a micro-batch that needs them."""
    assert context.kept is not None, "a micro-batch with chunks needs a place to keep keys and values"
    return context.kept


def _source(k_TGD: Tensor, v_TGD: Tensor, context: AttentionContext, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the micro-batch, then those kept of earlier chunks."""
    if not context.work.kept:
        return k_TGD, v_TGD
    keys, values = [k_TGD], [v_TGD]
    for rows in context.work.kept:
        k_parts, v_parts = kept_of(context).earlier(layer, rows)
        keys += k_parts
        values += v_parts
    return torch.cat(keys), torch.cat(values)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, context: AttentionContext, scale: float
) -> tuple[Tensor, Tensor]:
    work, kernel = context.work, context.kernel
    if work.num_tokens == 0:
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2], dtype=_accumulator_dtype(q_THD.dtype))
    if not work.steps and not work.kept_blocks:
        return kernel.forward(q_THD, k_SGD, v_SGD, work.local, causal=True, scale=scale)
    exchange = _KvExchange(context, k_SGD, v_SGD)
    exchange.post(1)
    out, lse_TH = kernel.forward(q_THD, k_SGD, v_SGD, work.local, causal=True, scale=scale)
    out_THD = out.to(_accumulator_dtype(q_THD.dtype), memory_format=torch.contiguous_format)
    lse_TH = lse_TH.contiguous()
    if work.kept_blocks:
        kept_PHD, kept_lse_PH = kernel.forward(q_THD, k_SGD, v_SGD, work.kept_blocks, causal=False, scale=scale)
        merge_blocks(out_THD, lse_TH, kept_PHD, kept_lse_PH, work.kept_blocks)
    for number, step in enumerate(work.steps, start=1):
        k_RGD, v_RGD = exchange.take(number)
        exchange.post(number + 1)
        if step.blocks:
            block_PHD, block_lse_PH = kernel.forward(q_THD, k_RGD, v_RGD, step.blocks, causal=False, scale=scale)
            merge_blocks(out_THD, lse_TH, block_PHD, block_lse_PH, step.blocks)
    exchange.close()
    return out_THD.to(q_THD.dtype), lse_TH


def merge_blocks(
    out_THD: Tensor, lse_TH: Tensor, block_PHD: Tensor, block_lse_PH: Tensor, blocks: Sequence[Block]
) -> None:
    """Fold attention over further keys into `out_THD` and `lse_TH`, in place.

    Args:
        out_THD, lse_TH: accumulators; lse finite in the rows of the blocks.
        block_PHD, block_lse_PH: results packed in the order of the blocks.
        blocks: which rows they belong to.
    """
    begin = 0
    for b in blocks:
        end = begin + b.q_end - b.q_begin
        out, lse = out_THD[b.q_begin : b.q_end], lse_TH[b.q_begin : b.q_end]
        block_lse = block_lse_PH[begin:end]
        weight = torch.sigmoid(block_lse - lse).unsqueeze(-1)
        out.lerp_(block_PHD[begin:end].to(out.dtype), weight)
        torch.logaddexp(lse, block_lse, out=lse)
        begin = end


class _KvExchange:
    """The KV of ring steps: posted one step ahead, taken once."""

    def __init__(self, context: AttentionContext, k_SGD: Tensor, v_SGD: Tensor) -> None:
        self.context = context
        self.unfinished_before = context.comm.num_unfinished
        self.in_flight: dict[int, tuple[Transfer, Tensor]] = {}
        self.kv_S2GD = torch.stack((k_SGD, v_SGD), dim=1)

    def post(self, number: int) -> None:
        """Start ring step `number`, if there is one."""
        steps = self.context.work.steps
        if number > len(steps):
            return
        step = steps[number - 1]
        received = self.kv_S2GD.new_empty((step.num_received_tokens, *self.kv_S2GD.shape[1:]))
        transfer = self.context.comm.post(
            "kv",
            _messages(step.sends, self.kv_S2GD, 2 * number),
            _messages(step.receives, received, 2 * number),
        )
        self.in_flight[number] = transfer, received

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """Wait for ring step `number`; returns (k_RGD, v_RGD)."""
        transfer, received = self.in_flight.pop(number)
        self.context.comm.wait(transfer)
        return received[:, 0], received[:, 1]

    def close(self) -> None:
        """Let go of the sends of earlier calls; those of this call stay in flight."""
        comm = self.context.comm
        comm.drain(keep=comm.num_unfinished - self.unfinished_before)


def _messages(parcels: Sequence[Parcel], rows: Tensor, tag: int) -> list[Message]:
    """One message per parcel. A single range is a view of `rows`, so receives land in place."""
    messages = []
    for parcel in parcels:
        parts = [rows[begin:end] for begin, end in parcel.ranges]
        messages.append(Message(parcel.peer, parts[0] if len(parts) == 1 else torch.cat(parts), tag))
    return messages


class _Backward:
    """The backward of one call: accumulators and the dKV in flight. Made, run once, dropped."""

    def __init__(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        context: AttentionContext,
        scale: float,
    ) -> None:
        self.q_THD, self.k_SGD, self.v_SGD = q_THD, k_SGD, v_SGD
        self.query_side = dout_THD, q_THD, out_THD, lse_TH
        self.context, self.scale = context, scale

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, and of all rows of the source buffer in the type they were added up in."""
        work = self.context.work
        if work.num_tokens == 0:
            return torch.zeros_like(self.q_THD), torch.zeros_like(self.k_SGD), torch.zeros_like(self.v_SGD)
        if not work.steps and not work.kept_blocks and not work.stored:
            return self._kernel(self.k_SGD, self.v_SGD, work.local, causal=True)
        dtype = _accumulator_dtype(self.q_THD.dtype)
        self.dq_THD, self.dk_SGD, self.dv_SGD = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (self.q_THD, self.k_SGD, self.v_SGD)
        )
        exchange = _KvExchange(self.context, self.k_SGD, self.v_SGD)
        exchange.post(1)
        self._add_local(work.early_causal, causal=True)
        self._add_local(work.early_full, causal=False)
        self._add_local(work.kept_blocks, causal=False)
        returning: tuple[RingStep, Transfer, Tensor] | None = None
        for number, step in enumerate(work.steps, start=1):
            k_RGD, v_RGD = exchange.take(number)
            exchange.post(number + 1)
            dkv_R2GD = self._ring_step(step, k_RGD, v_RGD)
            previous, returning = returning, self._return_dkv(number, step, dkv_R2GD)
            self._collect(previous)
        self._add_local(work.late_causal, causal=True)
        self._collect(returning)
        exchange.close()
        return self.dq_THD.to(self.q_THD.dtype), self.dk_SGD, self.dv_SGD

    def _kernel(
        self, k_SGD: Tensor, v_SGD: Tensor, blocks: Sequence[Block], *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout_THD, q_THD, out_THD, lse_TH = self.query_side
        return self.context.kernel.backward(
            dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_TH, blocks, causal=causal, scale=self.scale
        )

    def _add_local(self, blocks: Sequence[Block], *, causal: bool) -> None:
        if not blocks:
            return
        dq_PHD, dk_PGD, dv_PGD = self._kernel(self.k_SGD, self.v_SGD, blocks, causal=causal)
        _add_rows(self.dq_THD, dq_PHD, [(b.q_begin, b.q_end) for b in blocks])
        kv_ranges = [(b.kv_begin, b.kv_end) for b in blocks]
        _add_rows(self.dk_SGD, dk_PGD, kv_ranges)
        _add_rows(self.dv_SGD, dv_PGD, kv_ranges)

    def _ring_step(self, step: RingStep, k_RGD: Tensor, v_RGD: Tensor) -> Tensor:
        """Add dq of one ring step; returns the partial dkv_R2GD of the received rows."""
        if not step.blocks:
            return k_RGD.new_empty((0, 2, *k_RGD.shape[1:]))
        dq_PHD, dk_RGD, dv_RGD = self._kernel(k_RGD, v_RGD, step.blocks, causal=False)
        _add_rows(self.dq_THD, dq_PHD, [(b.q_begin, b.q_end) for b in step.blocks])
        return torch.stack((dk_RGD, dv_RGD), dim=1)

    def _return_dkv(self, number: int, step: RingStep, dkv_R2GD: Tensor) -> tuple[RingStep, Transfer, Tensor]:
        """Send each partial to the owner of its rows; start receiving those of the rows this rank sent."""
        num_rows = sum(parcel.num_tokens for parcel in step.sends)
        received = dkv_R2GD.new_empty((num_rows, *dkv_R2GD.shape[1:]))
        receives, begin, tag = [], 0, 2 * number + 1
        for parcel in step.sends:
            receives.append(Message(parcel.peer, received[begin : begin + parcel.num_tokens], tag))
            begin += parcel.num_tokens
        sends = _messages(step.receives, dkv_R2GD, tag)
        return step, self.context.comm.post("dkv", sends, receives), received

    def _collect(self, returning: tuple[RingStep, Transfer, Tensor] | None) -> None:
        if returning is None:
            return
        step, transfer, dkv_R2GD = returning
        self.context.comm.wait(transfer)
        ranges = [r for parcel in step.sends for r in parcel.ranges]
        _add_rows(self.dk_SGD, dkv_R2GD[:, 0], ranges)
        _add_rows(self.dv_SGD, dkv_R2GD[:, 1], ranges)


def _add_rows(total_TX: Tensor, part_PX: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Add rows packed in the order of `ranges` to those rows of `total_TX`, in place."""
    done = 0
    for begin, end in ranges:
        total_TX[begin:end] += part_PX[done : done + end - begin]
        done += end - begin
