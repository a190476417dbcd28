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
fixed order, so on a CPU a run repeats bit for bit; the CUDA kernel adds up dq with atomics, which agrees to rounding.
Cost on the host: a number of operations that depends on ring steps and peers, not on how many sequences there are.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytescale.runtime.attention.context import AttentionContext, Part, StepCalls
from bytescale.runtime.attention.interface import AttentionKernel, Call, QuerySide, Rows
from bytescale.runtime.p2p import Transfer
from bytescale.runtime.transport import Message


def distributed_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, context: AttentionContext, scale: float, layer: Hashable = 0
) -> Tensor:
    """Causal attention of every sequence of the micro-batch over all ranks that hold a piece of it.

    Args:
        q_THD, k_TGD, v_TGD: rows of this rank in the order of the micro-batch, rotary positions applied.
        context: the micro-batch; all members of its gang must call in the same order.
        scale: softmax scale.
        layer: name of the attention call on this stage, under which chunks keep their keys and values.

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
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, context: AttentionContext, scale: float, layer: Hashable
    ) -> Tensor:
        for rows in context.work.stored:
            context.kept_kv.put(layer, rows, k_TGD, v_TGD)
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
        queries = QuerySide(q_THD, out_THD, lse_TH, dout_THD)
        dq_THD, dk_SGD, dv_SGD = _backward(queries, k_SGD, v_SGD, context, ctx.scale)
        for rows in context.work.kept:
            context.kept_kv.add_gradients(ctx.layer, rows, dk_SGD, dv_SGD)
        for rows in context.work.stored:
            if (later := context.kept_kv.take_gradients(ctx.layer, rows)) is not None:
                dk_SGD[rows.begin : rows.end] += later[0]
                dv_SGD[rows.begin : rows.end] += later[1]
        own = (x_SGD[:num_tokens].to(k_TGD.dtype) for x_SGD in (dk_SGD, dv_SGD))
        return (dq_THD, *own, None, None, None)


def _source(k_TGD: Tensor, v_TGD: Tensor, context: AttentionContext, layer: Hashable) -> tuple[Tensor, Tensor]:
    """Keys and values of the micro-batch, then those kept of earlier chunks."""
    if not context.work.kept:
        return k_TGD, v_TGD
    keys, values = [k_TGD], [v_TGD]
    for rows in context.work.kept:
        k_parts, v_parts = context.kept_kv.earlier(layer, rows)
        keys += k_parts
        values += v_parts
    return torch.cat(keys), torch.cat(values)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, context: AttentionContext, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = context.kernel
    if context.local is None:
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2], dtype=_accumulator_dtype(q_THD.dtype))
    if not context.steps and context.kept_blocks is None:
        return kernel.forward(q_THD, k_SGD, v_SGD, context.local, scale)
    exchange = _KvExchange(context, k_SGD, v_SGD)
    exchange.post(1)
    out, lse_TH = kernel.forward(q_THD, k_SGD, v_SGD, context.local, scale)
    out_THD = out.to(_accumulator_dtype(q_THD.dtype), memory_format=torch.contiguous_format)
    lse_TH = lse_TH.contiguous()
    if context.kept_blocks is not None:
        kept_PHD, kept_lse_PH = kernel.forward(q_THD, k_SGD, v_SGD, context.kept_blocks, scale)
        merge(out_THD, lse_TH, kept_PHD, kept_lse_PH, context.kept_blocks.q)
    for number, step in enumerate(context.steps, start=1):
        k_RGD, v_RGD = exchange.take(number)
        exchange.post(number + 1)
        for call in step.calls:
            block_PHD, block_lse_PH = kernel.forward(q_THD, k_RGD, v_RGD, call, scale)
            merge(out_THD, lse_TH, block_PHD, block_lse_PH, call.q)
    exchange.close()
    return out_THD.to(q_THD.dtype), lse_TH


def merge(out_THD: Tensor, lse_TH: Tensor, block_PHD: Tensor, block_lse_PH: Tensor, rows: Rows) -> None:
    """Fold attention over further keys into `out_THD` and `lse_TH`, in place.

    Args:
        out_THD, lse_TH: accumulators; lse finite in `rows`.
        block_PHD, block_lse_PH: attention of those rows over the further keys.
        rows: which rows of the accumulators they belong to.
    """
    out_PHD, lse_PH = rows.take(out_THD), rows.take(lse_TH)
    weight_PH1 = torch.sigmoid(block_lse_PH - lse_PH).unsqueeze(-1)
    out_PHD.lerp_(block_PHD.to(out_PHD.dtype), weight_PH1)
    torch.logaddexp(lse_PH, block_lse_PH, out=lse_PH)
    if not rows.are_consecutive:
        rows.put(out_THD, out_PHD)
        rows.put(lse_TH, lse_PH)


class _KvExchange:
    """The KV of ring steps: posted one step ahead, taken once."""

    def __init__(self, context: AttentionContext, k_SGD: Tensor, v_SGD: Tensor) -> None:
        self.context = context
        self.unfinished_before = context.comm.num_unfinished
        self.in_flight: dict[int, tuple[Transfer, Tensor]] = {}
        self.kv_S2GD = torch.stack((k_SGD, v_SGD), dim=1)

    def post(self, number: int) -> None:
        """Start ring step `number`, if there is one."""
        if number > len(self.context.steps):
            return
        step = self.context.steps[number - 1]
        received = self.kv_S2GD.new_empty((step.num_received, *self.kv_S2GD.shape[1:]))
        transfer = self.context.comm.post(
            "kv",
            _messages(step.sends, step.sent.take(self.kv_S2GD), 2 * number),
            _messages(step.receives, received, 2 * number),
        )
        self.in_flight[number] = transfer, received

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """Wait for ring step `number`; returns (k_RGD, v_RGD)."""
        transfer, received = self.in_flight.pop(number)
        self.context.comm.wait(transfer)
        return received[:, 0], received[:, 1]

    def close(self) -> None:
        """Complete the sends of earlier calls; those of this call stay in flight."""
        comm = self.context.comm
        comm.drain(keep=comm.num_unfinished - self.unfinished_before)


def _messages(parts: Sequence[Part], packed: Tensor, tag: int) -> list[Message]:
    """One message per part, a view of `packed`."""
    return [Message(part.peer, packed[part.begin : part.end], tag) for part in parts]


@dataclass(frozen=True)
class _Gradients:
    """What the backward adds up, fp32 (fp64 for fp64): gradients of the queries and of the source buffer."""

    dq_THD: Tensor
    dk_SGD: Tensor
    dv_SGD: Tensor

    @classmethod
    def zeros_like(cls, *tensors: Tensor) -> "_Gradients":
        dtype = _accumulator_dtype(tensors[0].dtype)
        return cls(*(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in tensors))

    def add(self, q: Rows, kv: Rows, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        for total, rows, part in zip((self.dq_THD, self.dk_SGD, self.dv_SGD), (q, kv, kv), parts, strict=True):
            rows.add(total, part)


def _backward(
    queries: QuerySide, k_SGD: Tensor, v_SGD: Tensor, context: AttentionContext, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, and of all rows of the source buffer in the type they were added up in."""
    q_THD, kernel = queries.q_THD, context.kernel
    if context.local is None:
        return torch.zeros_like(q_THD), torch.zeros_like(k_SGD), torch.zeros_like(v_SGD)
    if not context.exchanges:
        return kernel.backward(queries, k_SGD, v_SGD, context.local, scale)
    total = _Gradients.zeros_like(q_THD, k_SGD, v_SGD)

    def add_local(call: Call | None) -> None:
        if call is not None:
            total.add(call.q, call.kv, kernel.backward(queries, k_SGD, v_SGD, call, scale))

    exchange = _KvExchange(context, k_SGD, v_SGD)
    exchange.post(1)
    add_local(context.early_causal)
    add_local(context.early_full)
    add_local(context.kept_blocks)
    returning: _Returning | None = None
    for number, step in enumerate(context.steps, start=1):
        k_RGD, v_RGD = exchange.take(number)
        exchange.post(number + 1)
        dkv_R2GD = _ring_step(step, queries, k_RGD, v_RGD, kernel, scale, total.dq_THD)
        previous, returning = returning, _return_dkv(context, number, step, dkv_R2GD)
        _collect(context, previous, total)
    add_local(context.late_causal)
    _collect(context, returning, total)
    exchange.close()
    return total.dq_THD.to(q_THD.dtype), total.dk_SGD, total.dv_SGD


def _ring_step(
    step: StepCalls,
    queries: QuerySide,
    k_RGD: Tensor,
    v_RGD: Tensor,
    kernel: AttentionKernel,
    scale: float,
    dq_THD: Tensor,
) -> Tensor:
    """Add dq of one ring step to `dq_THD`; returns the partial dkv_R2GD of the received rows."""
    dkv_R2GD = k_RGD.new_empty((step.num_received, 2, *k_RGD.shape[1:]))
    for call in step.calls:
        dq_PHD, dk_PGD, dv_PGD = kernel.backward(queries, k_RGD, v_RGD, call, scale)
        call.q.add(dq_THD, dq_PHD)
        call.kv.put(dkv_R2GD, torch.stack((dk_PGD, dv_PGD), dim=1))
    return dkv_R2GD


@dataclass(frozen=True)
class _Returning:
    """dKV on its way back to this rank, for the rows it sent."""

    rows: Rows
    transfer: Transfer
    dkv_R2GD: Tensor


def _return_dkv(context: AttentionContext, number: int, step: StepCalls, dkv_R2GD: Tensor) -> _Returning:
    """Send each partial to the owner of its rows; start receiving those of the rows this rank sent."""
    tag = 2 * number + 1
    received = dkv_R2GD.new_empty((step.sent.num_rows, *dkv_R2GD.shape[1:]))
    receives, sends = _messages(step.sends, received, tag), _messages(step.receives, dkv_R2GD, tag)
    return _Returning(step.sent, context.comm.post("dkv", sends, receives), received)


def _collect(context: AttentionContext, returning: _Returning | None, total: _Gradients) -> None:
    if returning is not None:
        context.comm.wait(returning.transfer)
        returning.rows.add(total.dk_SGD, returning.dkv_R2GD[:, 0])
        returning.rows.add(total.dv_SGD, returning.dkv_R2GD[:, 1])
