"""Attention on the CPU through torch's flash kernel, few calls whatever the number of blocks.

That kernel takes a batch of equal lengths, so blocks of at most `MAX_PADDED_TOKENS` tokens are padded to a length that
depends on their own alone, and those of one padded length are one call: at most 14 calls for causal blocks. Longer
blocks are one call each, on views; there every call is long against its overhead.

Padding is exact. A padded query repeats the last one of its block, and its gradient is zero, so it adds nothing. A
padded key comes after every real query, which causality hides; in full blocks a mask of -inf does.

Invariant: results of a block depend on it alone, not on what else is in the list. Cost: a copy of the short blocks'
rows. torch's kernel kills the process on empty input; blocks are never empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bytescale.arrays import IntArray, exclusive_sum
from bytescale.runtime.attention.interface import Call, QuerySide, Rows, kv_ranges, on_device, query_ranges
from bytescale.runtime.attention.work import Block

CPU = torch.device("cpu")

MAX_PADDED_TOKENS = 256
"""Longest block that is padded. A call for one of this length takes a hundred times its own overhead."""

PADDED_TOKENS = np.array([*range(8, 32, 8), *range(32, 128, 16), *range(128, MAX_PADDED_TOKENS + 1, 32)])
"""Lengths that blocks are padded to."""


@dataclass(frozen=True)
class _Side:
    """Query or key/value rows of a batch.

    Attributes:
        rows: where they are read, padding included; may repeat.
        packed: where the real ones are written, in block order.
        real: which rows of the batch are real; None when all are.
        padding: the others; None when there are none.
    """

    rows: Rows
    packed: Rows
    real: Tensor | None
    padding: Tensor | None

    def read(self, x_TXD: Tensor, size: int) -> Tensor:
        """[B, X, S, D] of these rows."""
        rows_BSXD: Tensor = self.rows.take(x_TXD).unflatten(0, (size, -1))
        return rows_BSXD.transpose(1, 2)

    def write(self, result_BXSD: Tensor, packed_PXD: Tensor) -> None:
        """The real rows of a result into their place."""
        flat = _flat(result_BXSD)
        self.packed.put(packed_PXD, flat if self.real is None else flat.index_select(0, self.real))


@dataclass(frozen=True)
class _Batch:
    """One call of torch's kernel: `size` blocks of one padded shape; `mask_B11S` hides padded keys of full blocks."""

    size: int
    q: _Side
    kv: _Side
    mask_B11S: Tensor | None

    @property
    def is_all(self) -> bool:
        """Whether its result is already what is wanted, rows in order and nothing padded, when it is the only one."""
        return self.q.padding is None and self.kv.padding is None


class CpuKernel:
    """One call of torch's CPU flash kernel per padded length of short blocks, and one per long block."""

    device = CPU

    def prepare(self, blocks: Sequence[Block], *, causal: bool) -> Call:
        edges = np.array([(b.q_begin, b.q_end, b.kv_begin, b.kv_end) for b in blocks], np.int64).reshape(-1, 4)
        num_q, num_kv = edges[:, 1] - edges[:, 0], edges[:, 3] - edges[:, 2]
        packed_q, packed_kv = exclusive_sum(num_q), exclusive_sum(num_kv)
        is_short = np.maximum(num_q, num_kv) <= MAX_PADDED_TOKENS
        is_square = np.array_equal(edges[:, :2], edges[:, 2:])
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for i, (short, q, kv) in enumerate(zip(is_short, _padded(num_q), _padded(num_kv), strict=True)):
            shapes.setdefault((int(q), int(kv), -1) if short else (int(num_q[i]), int(num_kv[i]), i), []).append(i)
        batches = []
        for (q_len, kv_len, _), members in shapes.items():
            q = _side(edges[members, 0], num_q[members], packed_q[members], q_len)
            kv = q if is_square else _side(edges[members, 2], num_kv[members], packed_kv[members], kv_len)
            mask = None if causal or kv.padding is None else _mask(num_kv[members], kv_len)
            batches.append(_Batch(len(members), q, kv, mask))
        q_rows, kv_rows = Rows.of_ranges(query_ranges(blocks), CPU), Rows.of_ranges(kv_ranges(blocks), CPU)
        return Call(q_rows, kv_rows, causal, tuple(batches))

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        batches: tuple[_Batch, ...] = call.details
        results = (self._forward(b, q_THD, k_SGD, v_SGD, call.causal, scale) for b in batches)
        if len(batches) == 1 and batches[0].is_all:
            out_BHSD, lse_BHS = next(results)
            return _flat(out_BHSD), _flat(lse_BHS)
        out_PHD = q_THD.new_empty((call.q.num_rows, q_THD.shape[1], v_SGD.shape[2]))
        lse_PH = q_THD.new_empty(out_PHD.shape[:2], dtype=lse_dtype(q_THD.dtype))
        for batch, (out_BHSD, lse_BHS) in zip(batches, results, strict=True):
            batch.q.write(out_BHSD, out_PHD)
            batch.q.write(lse_BHS, lse_PH)
        return out_PHD, lse_PH

    def _forward(
        self, batch: _Batch, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_BHSD, k_BGSD, v_BGSD = (
            side.read(x, batch.size) for side, x in ((batch.q, q_THD), (batch.kv, k_SGD), (batch.kv, v_SGD))
        )
        out_BHSD, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSD, k_BGSD, v_BGSD, 0.0, causal, attn_mask=_in_type(batch.mask_B11S, q_BHSD), scale=scale
        )
        return out_BHSD, lse_BHS

    def backward(
        self, queries: QuerySide, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        batches: tuple[_Batch, ...] = call.details
        results = (self._backward(b, queries, k_SGD, v_SGD, call.causal, scale) for b in batches)
        if len(batches) == 1 and batches[0].is_all:
            dq_BHSD, dk_BGSD, dv_BGSD = next(results)
            return _flat(dq_BHSD), _flat(dk_BGSD), _flat(dv_BGSD)
        dq_PHD = queries.q_THD.new_empty((call.q.num_rows, *queries.q_THD.shape[1:]))
        dk_PGD, dv_PGD = (x.new_empty((call.kv.num_rows, *x.shape[1:])) for x in (k_SGD, v_SGD))
        for batch, (dq_BHSD, dk_BGSD, dv_BGSD) in zip(batches, results, strict=True):
            batch.q.write(dq_BHSD, dq_PHD)
            batch.kv.write(dk_BGSD, dk_PGD)
            batch.kv.write(dv_BGSD, dv_PGD)
        return dq_PHD, dk_PGD, dv_PGD

    def _backward(
        self, batch: _Batch, queries: QuerySide, k_SGD: Tensor, v_SGD: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHSD, out_BHSD, dout_BHSD = (
            batch.q.read(x, batch.size) for x in (queries.q_THD, queries.out_THD, queries.dout_THD)
        )
        if batch.q.padding is not None:
            dout_BHSD = _flat(dout_BHSD).index_fill(0, batch.q.padding, 0.0).unflatten(0, (batch.size, -1))
            dout_BHSD = dout_BHSD.transpose(1, 2)
        lse_BHS = batch.q.read(queries.lse_TH, batch.size)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout_BHSD,
            q_BHSD,
            batch.kv.read(k_SGD, batch.size),
            batch.kv.read(v_SGD, batch.size),
            out_BHSD,
            lse_BHS,
            0.0,
            causal,
            attn_mask=_in_type(batch.mask_B11S, q_BHSD),
            scale=scale,
        )
        return gradients


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of log-sum-exp and accumulators: fp32, fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _flat(x_BXSD: Tensor) -> Tensor:
    """[B, X, S, ...] as [B * S, X, ...]: a view of what the kernel returns."""
    return x_BXSD.transpose(1, 2).flatten(0, 1)


def _padded(num_tokens: IntArray) -> IntArray:
    """The length that a short block is padded to."""
    longest = len(PADDED_TOKENS) - 1
    return np.asarray(PADDED_TOKENS[np.minimum(np.searchsorted(PADDED_TOKENS, num_tokens), longest)])


def _side(begins: IntArray, num_tokens: IntArray, packed_begins: IntArray, length: int) -> _Side:
    """Rows of blocks that are all padded to `length`."""
    if len(begins) == 1 and num_tokens[0] == length:
        own, place = ((int(at), int(at) + length) for at in (begins[0], packed_begins[0]))
        return _Side(Rows.of_ranges([own], CPU), Rows.of_ranges([place], CPU), None, None)
    at = np.arange(length)
    rows_NS = begins[:, None] + np.minimum(at, num_tokens[:, None] - 1)
    is_real = (at < num_tokens[:, None]).reshape(-1)
    packed = (packed_begins[:, None] + at).reshape(-1)[is_real]
    real, padding = (None, None) if is_real.all() else (np.flatnonzero(is_real), np.flatnonzero(~is_real))
    return _Side(
        Rows.of_index(rows_NS.reshape(-1), CPU),
        Rows.of_index(packed, CPU),
        None if real is None else on_device(real, CPU),
        None if padding is None else on_device(padding, CPU),
    )


def _mask(num_kv: IntArray, length: int) -> Tensor:
    """0 for the keys that are there, -inf for those that are not."""
    hidden_NS = torch.from_numpy(np.arange(length) >= num_kv[:, None])
    return torch.zeros(hidden_NS.shape).masked_fill_(hidden_NS, float("-inf"))[:, None, None]


def _in_type(mask_B11S: Tensor | None, q_BHSD: Tensor) -> Tensor | None:
    return None if mask_B11S is None else mask_B11S.to(q_BHSD.dtype)
