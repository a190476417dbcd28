"""Kernels compute lists of blocks exactly, each by itself; a layer call costs the host the same for any list."""

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.host_work import NoKernel
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.cpu_kernel import PADDED_TOKENS
from bytescale.runtime.attention.interface import QuerySide
from bytescale.runtime.attention.kernels import CpuKernel, CudaKernel
from bytescale.runtime.attention.ring import distributed_attention
from bytescale.runtime.attention.work import Block, attention_work, local_work
from bytescale.runtime.fsdp import gather, shard_model
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import PeerToPeer
from tests.plans import placed
from tests.ranks import RankPool, Ranks
from tests.runtime.models import small_decoder, world_of

CPU = torch.device("cpu")
H, G, D, SCALE = 4, 2, 16, 0.25


def shuffled_blocks(num_q: list[int], num_kv: list[int], seed: int) -> list[Block]:
    """Blocks over consecutive rows, listed in another order."""
    q_end, kv_end = np.cumsum(num_q).tolist(), np.cumsum(num_kv).tolist()
    blocks = [Block(b - q, b, d - kv, d) for q, kv, b, d in zip(num_q, num_kv, q_end, kv_end, strict=True)]
    return [blocks[i] for i in np.random.default_rng(seed).permutation(len(blocks))]


def computed(blocks: list[Block], inputs: list[torch.Tensor], *, causal: bool) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv packed in block order; the queries' final out and lse are those of these blocks."""
    q, k, v, dout = inputs
    kernel = CpuKernel()
    call = kernel.prepare(blocks, causal=causal)
    out, lse = kernel.forward(q, k, v, call, SCALE)
    final_out, final_lse = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=lse.dtype)
    call.q.put(final_out, out)
    call.q.put(final_lse, lse)
    return [out, lse, *kernel.backward(QuerySide(q, final_out, final_lse, dout), k, v, call, SCALE)]


def exact(b: Block, inputs: list[torch.Tensor], *, causal: bool) -> list[torch.Tensor]:
    """The same of one block by plain arithmetic in fp64."""
    q, k, v = (
        x[begin:end].double().requires_grad_()
        for x, begin, end in zip(inputs, (b.q_begin, *[b.kv_begin] * 2), (b.q_end, *[b.kv_end] * 2), strict=False)
    )
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(H // G, 1)) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(H // G, 1))
    out.backward(inputs[3][b.q_begin : b.q_end].double())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), scores.logsumexp(-1).T.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_padded_blocks_are_exact_and_independent(causal: bool, dtype: torch.dtype) -> None:
    """Short blocks of many lengths beside long ones: every result is that of its block alone, bit for bit."""
    lengths = [1, 7, 8, 9, 31, 32, 33, 100, 256, 257, 7, 300, 1]
    blocks = shuffled_blocks(lengths, lengths if causal else lengths[::-1], seed=1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(H, D), (G, D), (G, D), (H, D)]
    inputs = [torch.randn(sum(lengths), *s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    packed = computed(blocks, inputs, causal=causal)
    q_begin = kv_begin = 0
    for b in blocks:
        num_q, num_kv = b.q_end - b.q_begin, b.kv_end - b.kv_begin
        slices = [slice(q_begin, q_begin + num_q)] * 3 + [slice(kv_begin, kv_begin + num_kv)] * 2
        alone, reference = computed([b], inputs, causal=causal), exact(b, inputs, causal=causal)
        for ours, one, right, rows in zip(packed, alone, reference, slices, strict=True):
            assert torch.equal(ours[rows], one), b
            if dtype != torch.bfloat16:
                error = (one.double() - right).abs().max() / right.abs().max().clamp_min(1.0)
                assert error <= {torch.float64: 1e-12, torch.float32: 1e-5}[dtype], b
        q_begin, kv_begin = q_begin + num_q, kv_begin + num_kv


def test_blocks_in_order_are_not_copied() -> None:
    for kernel in (CpuKernel(), CudaKernel(torch.device("meta"))):
        call = kernel.prepare([Block(0, 300, 0, 300), Block(300, 900, 300, 900)], causal=True)
        x = torch.empty(900, H, D)
        assert call.q.take(x).data_ptr() == x.data_ptr() and call.kv.take(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("causal", [True, False])
def test_the_cuda_kernel_has_the_right_shapes(causal: bool) -> None:
    """On meta tensors, which know shapes and types alone, with blocks in order and not, and a single query row."""
    meta = torch.device("meta")
    kernel = CudaKernel(meta)
    q = torch.empty(12, H, 64, dtype=torch.bfloat16, device=meta)
    kv = torch.empty(12, G, 64, dtype=torch.bfloat16, device=meta)
    lse = torch.empty(12, H, device=meta)
    for blocks in (
        [Block(0, 4, 0, 4), Block(4, 10, 4, 10)],
        [Block(6, 9, 6, 9), Block(1, 3, 1, 3)],
        [Block(5, 6, 5, 6)],
    ):
        call = kernel.prepare(blocks, causal=causal)
        num_rows = sum(b.q_end - b.q_begin for b in blocks)
        out, block_lse = kernel.forward(q, kv, kv, call, SCALE)
        assert out.shape == (num_rows, H, 64) and block_lse.shape == (num_rows, H)
        gradients = kernel.backward(QuerySide(q, q, lse, q), kv, kv, call, SCALE)
        assert [g.shape[:2] for g in gradients] == [(num_rows, H), (num_rows, G), (num_rows, G)]


def test_few_kernel_calls_for_many_short_blocks() -> None:
    lengths = np.random.default_rng(0).integers(1, 257, 1000).tolist()
    call = CpuKernel().prepare(local_work(lengths).local, causal=True)
    assert len(call.details) <= len(PADDED_TOKENS)


def num_python_calls(function: Any) -> int:
    """Functions called, Python's and C's, on this thread."""
    count = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _model_calls(ranks: Ranks) -> list[int]:
    """Calls of a forward and a backward through a sharded model in bf16, for few and for many sequences."""
    world = world_of(ranks)
    model = LossModel(small_decoder("llama"))
    shard_model(model, world, torch.bfloat16)
    counts = []
    for length in (200, 200, 100, 2):  # the first warms up
        lengths = [length] * (2000 // length)
        ids, positions = torch.arange(2000) % 97, torch.arange(length).repeat(len(lengths))
        context = AttentionContext(local_work(lengths), NoKernel(), world.comm)
        gather(model)
        # The graph runs its backward on this thread, so that it is counted.
        with torch.autograd.set_multithreading_enabled(False):
            counts.append(num_python_calls(lambda: model(ids, ids, positions, context).backward()))  # noqa: B023
    return counts[1:]


def test_host_work_of_a_layer_does_not_grow_with_sequences(ranks: RankPool) -> None:
    for few, some, many in ranks.run(1, _model_calls):
        assert few == some == many
    assert not dataclasses.is_dataclass(AttentionContext)


def _ring_calls(ranks: Ranks) -> list[int]:
    counts = []
    for num_sequences in (4, 4, 100):
        plan = placed([600 // num_sequences] * num_sequences, [[(0, 0), (1, 0)]] * num_sequences, 2)
        work = attention_work(plan, ranks.rank)[0]
        comm = PeerToPeer(ranks.group, 60.0, CPU)
        context = AttentionContext(work, NoKernel(), comm)
        q, k, v = (torch.zeros(work.num_tokens, heads, 8, requires_grad=True) for heads in (H, G, G))

        def both() -> None:
            distributed_attention(q, k, v, context, SCALE).sum().backward()  # noqa: B023

        with torch.autograd.set_multithreading_enabled(False):
            counts.append(num_python_calls(both))
        comm.drain()
    return counts[1:]


def test_host_work_of_a_ring_does_not_grow_with_sequences(ranks: RankPool) -> None:
    """Merges, gradients and messages are index operations; a constant number more where rows are not consecutive."""
    for few, many in ranks.run(2, _ring_calls):
        assert many == few
