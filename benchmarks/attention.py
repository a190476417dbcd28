"""Distributed attention beside its bounds: the bare kernel at degree 1, half the time at degree 2.

python -m benchmarks.attention            about two minutes on two cores
"""

import time

import torch
import torch.distributed as dist

from benchmarks.common import on_ranks, paired, report
from bytescale.plan.step_plan import step_plan
from bytescale.plan.zigzag import piece_tokens
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.ring import distributed_attention
from bytescale.runtime.attention.work import attention_work, local_work
from bytescale.runtime.p2p import PeerToPeer

HEADS, KV_HEADS, HEAD_DIM = 4, 4, 64


def _inputs(length: int, dtype: torch.dtype, kv_heads: int = KV_HEADS) -> list[torch.Tensor]:
    shapes = ((length, HEADS), (length, kv_heads), (length, kv_heads), (length, HEADS))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, HEAD_DIM, generator=generator).to(dtype) for shape in shapes]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def degree_one() -> list[dict[str, object]]:
    """Our function on whole sequences against F.scaled_dot_product_attention, forward and backward."""
    rows = []
    comm = PeerToPeer(None, 60.0, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        for length in (2048, 4096, 8192):
            q, k, v, dout = _inputs(length, dtype)
            context = AttentionContext(local_work([length]), CpuKernel(), comm)

            def ours(q=q, k=k, v=v, dout=dout, context=context) -> None:  # type: ignore[no-untyped-def]
                distributed_attention(q, k, v, context, HEAD_DIM**-0.5).backward(dout)

            def bare(q=q, k=k, v=v, dout=dout) -> None:  # type: ignore[no-untyped-def]
                q_BHSD, k_BHSD, v_BHSD = (x.transpose(0, 1)[None] for x in (q, k, v))
                out = torch.nn.functional.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)
                out.backward(dout.transpose(0, 1)[None])

            rows.append({"dtype": str(dtype)[6:], "length": length, **paired(ours, bare, 9)})
    return rows


def _degree_two(rank: int, size: int, length: int, pairs: int) -> dict[str, float]:
    """On both ranks: one rank alone, then both together, in turn."""
    comm = PeerToPeer(dist.new_group(), 60.0, torch.device("cpu"))
    plan = step_plan(
        strategy="benchmark",
        hdp_size=2,
        tokens_per_rank=length,
        num_layers=1,
        lengths=[length],
        sequence=[0, 0],
        rank=[0, 1],
        micro_batch=[0, 0],
        tokens=[piece_tokens(length, 2, k) for k in range(2)],
        cp_degree=[2, 2],
        cp_index=[0, 1],
    )
    shared = AttentionContext(attention_work(plan, rank)[0], CpuKernel(), comm)
    whole = AttentionContext(local_work([length]), CpuKernel(), comm)
    together_s, alone_s, waits_ms = [], [], []
    for repeat in range(pairs + 1):
        q, k, v, dout = _inputs(int(plan.pieces.tokens[rank]), torch.float32)
        dist.barrier()
        comm.reset_counters()
        begin_s = time.perf_counter()
        distributed_attention(q, k, v, shared, HEAD_DIM**-0.5).backward(dout)
        comm.drain()
        dist.barrier()
        if repeat:
            together_s.append(time.perf_counter() - begin_s)
            waits_ms.append(1e3 * sum(w.duration_s for w in comm.waits()))
        if rank == 0:
            q, k, v, dout = _inputs(length, torch.float32)
            begin_s = time.perf_counter()
            distributed_attention(q, k, v, whole, HEAD_DIM**-0.5).backward(dout)
            if repeat:
                alone_s.append(time.perf_counter() - begin_s)
        dist.barrier()
    if rank != 0:
        return {}
    return {
        "one_rank_ms": 1e3 * min(alone_s),
        "two_ranks_ms": 1e3 * min(together_s),
        "share_percent": 100 * min(together_s) / min(alone_s),
        "best_wait_ms": min(waits_ms),
        "median_wait_ms": sorted(waits_ms)[len(waits_ms) // 2],
    }


def main() -> None:
    torch.set_num_threads(1)
    report("Degree 1 against the bare kernel, forward and backward, one thread (left: ours)", degree_one())
    rows = [{"length": length, **on_ranks(2, _degree_two, length, 5)} for length in (2048, 8192)]
    report("Degree 2 against one rank, forward and backward, one thread each, best of 5 pairs", rows)


if __name__ == "__main__":
    main()
