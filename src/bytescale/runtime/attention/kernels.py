"""Block attention kernels behind one small interface: torch's own flash kernels for CPU and CUDA.

Shapes: T query rows, S key/value rows, P rows packed in block order, H query heads, G key/value heads, D head size.
q_THD, k_SGD, v_SGD; LSE is lse_PH, the natural log-sum-exp of the scaled scores, fp32 (fp64 for fp64).

A kernel computes a list of blocks (query rows x key/value rows), all full or all causal (causal blocks are square),
and returns results packed in block order. The backward takes the *final* output and LSE of the query rows,
which is what makes the blocks of a ring add up to the exact gradient. Blocks are never empty: torch's CPU kernel kills
the process on empty input.

Hardware: the CPU kernel handles fp64, fp32 and bf16 and any head size. The CUDA kernel is torch's varlen flash
attention, bf16 and fp16 only; it has not run on a GPU yet.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bytescale.errors import UserError
from bytescale.runtime.attention.work import Block

MIN_CUDA_CAPABILITY = (8, 0)
"""Oldest GPUs with torch's flash kernel: Ampere."""

MAX_CUDA_HEAD_DIM = 256
"""Widest head of the CUDA kernel."""


class AttentionKernel(Protocol):
    """The interface of a back-end."""

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, blocks: Sequence[Block], *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (out_PHD, lse_PH)."""
        ...

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        blocks: Sequence[Block],
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq_PHD, dk_PGD, dv_PGD), packed by query rows and by key/value rows of the blocks."""
        ...


def _bhsd(x_SHD: Tensor) -> Tensor:
    """[S, H, D] as a view [1, H, S, D]."""
    return x_SHD.transpose(0, 1).unsqueeze(0)


def _shd(x_BHSD: Tensor) -> Tensor:
    """[1, H, S, D] as a view [S, H, D]."""
    return x_BHSD[0].transpose(0, 1)


def _pack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class CpuKernel:
    """One call of torch's CPU flash kernel per block, on strided views, without copies."""

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, blocks: Sequence[Block], *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for b in blocks:
            out_BHSD, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _bhsd(q_THD[b.q_begin : b.q_end]),
                _bhsd(k_SGD[b.kv_begin : b.kv_end]),
                _bhsd(v_SGD[b.kv_begin : b.kv_end]),
                0.0,
                causal,
                scale=scale,
            )
            outs.append(_shd(out_BHSD))
            lses.append(lse_BHS[0].transpose(0, 1))
        return _pack(outs), _pack(lses)

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        blocks: Sequence[Block],
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: tuple[list[Tensor], ...] = ([], [], [])
        for b in blocks:
            q, kv = slice(b.q_begin, b.q_end), slice(b.kv_begin, b.kv_end)
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _bhsd(dout_THD[q]),
                _bhsd(q_THD[q]),
                _bhsd(k_SGD[kv]),
                _bhsd(v_SGD[kv]),
                _bhsd(out_THD[q]),
                lse_TH[q].transpose(0, 1).unsqueeze(0),
                0.0,
                causal,
                scale=scale,
            )
            for part, gradient in zip(parts, gradients, strict=True):
                part.append(_shd(gradient))
        return _pack(parts[0]), _pack(parts[1]), _pack(parts[2])


class CudaKernel:
    """One varlen call of torch's CUDA flash kernel for all blocks. Not yet run on a GPU."""

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, blocks: Sequence[Block], *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        cu_q, cu_kv, max_q, max_kv = _cumulative(blocks, q_THD.device)
        out_PHD, lse_HP, *_ = torch.ops.aten._flash_attention_forward(
            _gather_q(q_THD, blocks),
            _gather_kv(k_SGD, blocks),
            _gather_kv(v_SGD, blocks),
            cu_q,
            cu_kv,
            max_q,
            max_kv,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out_PHD, lse_HP.transpose(0, 1).contiguous()

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        blocks: Sequence[Block],
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_q, cu_kv, max_q, max_kv = _cumulative(blocks, q_THD.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _gather_q(dout_THD, blocks),
            _gather_q(q_THD, blocks),
            _gather_kv(k_SGD, blocks),
            _gather_kv(v_SGD, blocks),
            _gather_q(out_THD, blocks),
            _gather_q(lse_TH, blocks).transpose(0, 1).contiguous(),
            cu_q,
            cu_kv,
            max_q,
            max_kv,
            0.0,
            causal,
            torch.zeros(2, dtype=torch.uint64, device=q_THD.device),
            torch.empty(0, device=q_THD.device),
            scale=scale,
        )
        return dq, dk, dv


def _gather_q(x_TX: Tensor, blocks: Sequence[Block]) -> Tensor:
    return _pack([x_TX[b.q_begin : b.q_end] for b in blocks]).contiguous()


def _gather_kv(x_SX: Tensor, blocks: Sequence[Block]) -> Tensor:
    return _pack([x_SX[b.kv_begin : b.kv_end] for b in blocks]).contiguous()


def _cumulative(blocks: Sequence[Block], device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv), int32 on `device`."""
    num_q = torch.tensor([0] + [b.q_end - b.q_begin for b in blocks], dtype=torch.int32)
    num_kv = torch.tensor([0] + [b.kv_end - b.kv_begin for b in blocks], dtype=torch.int32)
    cu_q, cu_kv = num_q.cumsum(0, dtype=torch.int32), num_kv.cumsum(0, dtype=torch.int32)
    return cu_q.to(device), cu_kv.to(device), int(num_q.max()), int(num_kv.max())


def check_kernel(device_type: str, dtype: torch.dtype, head_dim: int) -> None:
    """Whether a device of that type can compute attention of that kind; needs no such device.

    Raises:
        UserError: it cannot; says what can.
    """
    if device_type not in ("cpu", "cuda"):
        raise UserError(f"no attention kernel for device {device_type!r}; use cpu or cuda")
    if device_type == "cpu":
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise UserError(f"attention on CUDA runs in bfloat16 or float16, not {dtype}; set train.dtype = 'bfloat16'")
    if head_dim % 8 or head_dim > MAX_CUDA_HEAD_DIM:
        raise UserError(
            f"the model's heads have {head_dim} elements; attention on CUDA needs a multiple of 8, at most "
            f"{MAX_CUDA_HEAD_DIM}: change head_dim or set train.device = 'cpu'"
        )


def select_kernel(device: torch.device) -> AttentionKernel:
    """The back-end for `device`, which `check_kernel` has let pass.

    Raises:
        UserError: the GPU is too old.
    """
    if device.type == "cpu":
        return CpuKernel()
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CUDA_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"attention on CUDA needs compute capability 8.0, {name} has {capability[0]}.{capability[1]}")
    return CudaKernel()
