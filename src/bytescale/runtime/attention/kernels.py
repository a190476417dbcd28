"""Block attention kernels behind one small interface: torch's own flash kernels for CPU and CUDA.

Shapes and rules of a call: `bytescale.runtime.attention.interface`.

Hardware: the CPU kernel (`cpu_kernel`) handles fp64, fp32 and bf16 and any head size. The CUDA kernel is torch's varlen
flash attention: bf16 and fp16, heads of a multiple of 8 elements up to 256, compute capability 8.0; it has not run on a
GPU yet. Its dq is summed with atomics, so that a repeated run agrees to rounding there, not bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bytescale.errors import UserError
from bytescale.runtime.attention.cpu_kernel import CpuKernel
from bytescale.runtime.attention.interface import (
    AttentionKernel,
    Call,
    QuerySide,
    Rows,
    kv_ranges,
    on_device,
    query_ranges,
)
from bytescale.runtime.attention.work import Block

MIN_CUDA_CAPABILITY = (8, 0)
"""Oldest GPUs with torch's flash kernel: Ampere."""

MAX_CUDA_HEAD_DIM = 256
"""Widest head of the CUDA kernel."""


@dataclass(frozen=True)
class _Lengths:
    """int32 `cu_seqlens` of the blocks and their maxima, and the two empty random states that the backward asks for."""

    cu_q: Tensor
    cu_kv: Tensor
    max_q: int
    max_kv: int
    rng_state: Tensor
    unused: Tensor


class CudaKernel:
    """One varlen call of torch's CUDA flash kernel for all blocks. Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, blocks: Sequence[Block], *, causal: bool) -> Call:
        num_q = np.array([b.q_end - b.q_begin for b in blocks], np.int32)
        num_kv = np.array([b.kv_end - b.kv_begin for b in blocks], np.int32)
        lengths = _Lengths(
            cu_q=on_device(np.cumsum(np.append(0, num_q), dtype=np.int32), self.device),
            cu_kv=on_device(np.cumsum(np.append(0, num_kv), dtype=np.int32), self.device),
            max_q=int(num_q.max(initial=0)),
            max_kv=int(num_kv.max(initial=0)),
            rng_state=torch.zeros(2, dtype=torch.uint64, device=self.device),
            unused=torch.empty(0, device=self.device),
        )
        q = Rows.of_ranges(query_ranges(blocks), self.device)
        return Call(q, Rows.of_ranges(kv_ranges(blocks), self.device), causal, lengths)

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        n: _Lengths = call.details
        out_PHD, lse_HP, *_ = torch.ops.aten._flash_attention_forward(
            _dense(call.q.take(q_THD)),
            _dense(call.kv.take(k_SGD)),
            _dense(call.kv.take(v_SGD)),
            n.cu_q,
            n.cu_kv,
            n.max_q,
            n.max_kv,
            0.0,
            call.causal,
            False,
            scale=scale,
        )
        return out_PHD, lse_HP.transpose(0, 1).contiguous()

    def backward(
        self, queries: QuerySide, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        n: _Lengths = call.details
        dq_PHD, dk_PGD, dv_PGD = torch.ops.aten._flash_attention_backward(
            _dense(call.q.take(queries.dout_THD)),
            _dense(call.q.take(queries.q_THD)),
            _dense(call.kv.take(k_SGD)),
            _dense(call.kv.take(v_SGD)),
            _dense(call.q.take(queries.out_THD)),
            call.q.take(queries.lse_TH).transpose(0, 1).contiguous(),
            n.cu_q,
            n.cu_kv,
            n.max_q,
            n.max_kv,
            0.0,
            call.causal,
            n.rng_state,
            n.unused,
            scale=scale,
        )
        return dq_PHD, dk_PGD, dv_PGD


def _dense(x_SHD: Tensor) -> Tensor:
    """`x_SHD` itself where its heads are contiguous, which is all that the kernel asks for."""
    return x_SHD if x_SHD.stride(-1) == 1 else x_SHD.contiguous()


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
    return CudaKernel(device)
