"""Distributed attention against one unsharded call: output and all gradients, any degree, any length."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from bytescale.plan.zigzag import piece_positions
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import Rows
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.ring import distributed_attention, merge
from bytescale.runtime.attention.work import attention_work
from bytescale.runtime.p2p import PeerToPeer
from tests.plans import drawn, placed
from tests.ranks import RankPool, Ranks

LENGTHS = (1, 2, 3, 7, 64, 67, 1000, 4097)
HEADS = ((4, 4), (4, 2), (4, 1))
HEAD_DIM = 32


def make_inputs(length: int, heads: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """q, k, v and the output's gradient of one sequence, [length, heads, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(length, n, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for n in num_heads]


def unsharded(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of one causal kernel call over the whole sequence, in the inputs' type."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    q_BHSD, k_BGSD, v_BGSD = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)
    out = out[0].transpose(0, 1)
    out.backward(inputs[3])
    return [out.detach(), q.grad, k.grad, v.grad]


@cache
def references(
    length: int, heads: tuple[int, int], dtype: torch.dtype, seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`unsharded` in fp64 and, of bf16 inputs, in their own type; once for all degrees, kept over the tests."""
    inputs = make_inputs(length, heads, dtype, seed)
    exact = unsharded([x.double() for x in inputs])
    return exact, unsharded(inputs) if dtype == torch.bfloat16 else exact


def sharded(
    ranks: Ranks, lengths: list[int], placement: list[list[tuple[int, int]]], heads: tuple[int, int], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """Rows of out, dq, dk, dv that this rank holds, one entry a micro-batch. Inputs are seeded by sequence."""
    plan = placed(lengths, placement, ranks.size)
    comm = PeerToPeer(ranks.group, 60.0, torch.device("cpu"))
    results = []
    for rows, work in zip(plan.micro_batch_rows(ranks.rank), attention_work(plan, ranks.rank), strict=True):
        parts = []
        for row in rows:
            sequence = int(plan.pieces.sequence[row])
            length = lengths[sequence]
            positions = piece_positions(length, int(plan.pieces.cp_degree[row]), int(plan.pieces.cp_index[row]))
            parts.append([x[positions] for x in make_inputs(length, heads, dtype, sequence)])
        q, k, v, dout = (torch.cat(columns) for columns in zip(*parts, strict=True))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = distributed_attention(q, k, v, AttentionContext(work, CpuKernel(), comm), HEAD_DIM**-0.5)
        out.backward(dout)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    comm.drain()
    return results


def sharded_many(ranks: Ranks, cases: list[tuple]) -> list[list[list[torch.Tensor]]]:
    return [sharded(ranks, *case) for case in cases]


def assemble(results: list, lengths: list[int], placement: list[list[tuple[int, int]]], size: int) -> list:
    """Full-length out, dq, dk, dv of every sequence from the rows of all ranks."""
    plan = placed(lengths, placement, size)
    whole: list[list[torch.Tensor | None]] = [[None] * 4 for _ in lengths]
    for rank in range(size):
        for m, rows in enumerate(plan.micro_batch_rows(rank)):
            begin = 0
            for row in rows:
                sequence, tokens = int(plan.pieces.sequence[row]), int(plan.pieces.tokens[row])
                degree, index = int(plan.pieces.cp_degree[row]), int(plan.pieces.cp_index[row])
                positions = piece_positions(lengths[sequence], degree, index)
                for i in range(4):
                    rows_of_piece = results[rank][m][i][begin : begin + tokens]
                    if whole[sequence][i] is None:
                        whole[sequence][i] = rows_of_piece.new_full(
                            (lengths[sequence], *rows_of_piece.shape[1:]), math.nan
                        )
                    whole[sequence][i][positions] = rows_of_piece
                begin += tokens
    return whole


def check_close(whole: list, lengths: list[int], heads: tuple[int, int], dtype: torch.dtype) -> None:
    for sequence, length in enumerate(lengths):
        exact, single = references(length, heads, dtype, sequence)
        for ours, reference, kernel in zip(whole[sequence], exact, single, strict=True):
            if dtype == torch.bfloat16:
                # Error norms: a single entry is off by chance, by how its few roundings happen to fall.
                error, bound = (ours.double() - reference).norm(), 2 * (kernel.double() - reference).norm()
            else:
                error = (ours.double() - reference).abs().max()
                bound = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
            assert error <= bound, (sequence, length, error, bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("degree", range(1, 9))
def test_every_degree_and_length_equals_unsharded(ranks: RankPool, degree: int, dtype: torch.dtype) -> None:
    cases = []
    for length in LENGTHS:
        # The longest length costs most; all head shapes at the others, one at this.
        for heads in HEADS if length < 4097 else HEADS[1:2]:
            cases.append(([length], [[(r, 0) for r in range(degree)]], heads, dtype))
    results = ranks.run(degree, sharded_many, cases)
    for i, (lengths, placement, heads, _) in enumerate(cases):
        check_close(assemble([r[i] for r in results], lengths, placement, degree), lengths, heads, dtype)


MIXED = [
    # several sequences of different degrees in one gang, with whole short ones beside them
    ([300, 50, 211, 7], [[(0, 0), (1, 0), (2, 0)], [(0, 0)], [(1, 0), (3, 0)], [(2, 0)]], 4),
    # ranks in any order, and a gang of two sequences over the same ranks in opposite order
    ([129, 64, 33], [[(3, 0), (0, 0)], [(0, 0), (3, 0), (1, 0)], [(2, 0)]], 4),
    # the last micro-batch of one rank is the first of another; rank 3 is idle
    ([40, 41, 90, 20], [[(0, 0)], [(0, 1)], [(0, 2), (1, 0)], [(1, 1), (2, 0)]], 4),
    # fewer tokens than ranks
    ([1, 3, 67], [[(r, 0) for r in range(4)]] * 3, 4),
    ([2, 1, 5, 3], [[(r, 0) for r in range(5)]] * 4, 5),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_mixed_micro_batches_equal_unsharded(ranks: RankPool, dtype: torch.dtype) -> None:
    for lengths, placement, size in MIXED:
        results = ranks.run(size, sharded, lengths, placement, (4, 2), dtype)
        check_close(assemble(results, lengths, placement, size), lengths, (4, 2), dtype)


@pytest.mark.long
def test_length_32769_on_four_ranks(ranks: RankPool) -> None:
    lengths, placement = [32769], [[(r, 0) for r in range(4)]]
    results = ranks.run(4, sharded, lengths, placement, (1, 1), torch.float32, timeout_s=200)
    check_close(assemble(results, lengths, placement, 4), lengths, (1, 1), torch.float32)


def test_runs_repeat_bit_for_bit(ranks: RankPool) -> None:
    case = ([501, 77], [[(0, 0), (1, 0), (2, 0)], [(1, 0), (0, 0)]], (4, 2), torch.bfloat16)
    first, second = ranks.run(3, sharded, *case), ranks.run(3, sharded, *case)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def _strided(ranks: Ranks) -> bool:
    """Views of one packed qkv tensor give the gradients of contiguous inputs."""
    plan = drawn("64", "0[0/2]", "0[1/2]")
    work = attention_work(plan, ranks.rank)[0]
    context = AttentionContext(work, CpuKernel(), PeerToPeer(ranks.group, 60.0, torch.device("cpu")))
    packed = torch.randn(32, 3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
    views = packed.clone().requires_grad_()
    out = distributed_attention(views[:, 0], views[:, 1], views[:, 2], context, 0.2)
    out.square().sum().backward()
    plain = [packed[:, i].clone().contiguous().requires_grad_() for i in range(3)]
    out_plain = distributed_attention(*plain, context, 0.2)
    out_plain.square().sum().backward()
    context.comm.drain()
    return torch.equal(out, out_plain) and all(torch.equal(views.grad[:, i], plain[i].grad) for i in range(3))


def test_strided_inputs(ranks: RankPool) -> None:
    assert all(ranks.run(2, _strided))


@pytest.mark.parametrize("rows", [[0, 1], [1, 0]], ids=["slice", "index"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("gap", [0.0, 100.0, 1e4])
def test_merge_survives_far_apart_blocks(swap: bool, gap: float, rows: list[int]) -> None:
    scores = torch.tensor([[1.0, -gap], [0.5, -gap - 3.0]], dtype=torch.float64)
    values = torch.tensor([[2.0], [5.0]], dtype=torch.float64)
    first, second = (1, 0) if swap else (0, 1)
    out = values[first].expand(2, 1, 1).clone()
    lse = scores[:, first : first + 1].clone()
    further = scores[rows, second : second + 1]
    merge(out, lse, values[second].expand(2, 1, 1), further, Rows.of_index(np.array(rows), torch.device("cpu")))
    expected = torch.softmax(scores, dim=1) @ values
    torch.testing.assert_close(out[:, 0], expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(lse[:, 0], torch.logsumexp(scores, 1), rtol=1e-14, atol=1e-14)


def test_zigzag_is_per_sequence() -> None:
    plan = drawn("8 8", "0[0/2] 1[0/2]", "0[1/2] 1[1/2]")
    offsets = [0, 8]
    owned = [
        int(offsets[plan.pieces.sequence[row]] + p)
        for row in next(plan.micro_batch_rows(0))
        for p in piece_positions(8, 2, int(plan.pieces.cp_index[row]))
    ]
    assert owned == [0, 1, 6, 7, 8, 9, 14, 15]
