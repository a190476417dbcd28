"""First hour on a GPU: kernels against exact arithmetic, then the quickstart, offloading and a profile, as one table.

python -m benchmarks.gpu_first_run          under 8 minutes on one GPU or more
python -m benchmarks.gpu_first_run --dry    the same code on the CPU

Kernels compute in bf16 what plain arithmetic computes in fp64; a row passes when its error norm is within 2 % of the
result's. Commands run as a user would type them, each bounded in time. Exit code 1 when a row fails.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import hardware, report
from bytescale.plan.zigzag import piece_runs
from bytescale.runtime.attention.interface import AttentionKernel, QuerySide
from bytescale.runtime.attention.kernels import select_kernel
from bytescale.runtime.attention.ring import merge
from bytescale.runtime.attention.work import Block
from bytescale.runtime.device import Machine

TOLERANCE = 0.02
COMMAND_TIMEOUT_S = 110.0
QUICKSTART = str(Path(__file__).parents[1] / "configs" / "quickstart.toml")

CASES: dict[str, tuple[list[Block], bool, int, int, int]] = {
    # name: blocks, causal, query heads, key/value heads, head size
    "one query row": ([Block(0, 1, 0, 700)], False, 4, 4, 64),
    "one row, causal": ([Block(0, 1, 0, 1)], True, 4, 4, 64),
    "grouped heads": ([Block(0, 700, 0, 700)], True, 8, 2, 64),
    "head size 128": ([Block(0, 300, 0, 300)], True, 4, 1, 128),
    "head size 256": ([Block(0, 300, 0, 300)], True, 2, 1, 256),
    "pack in order": ([Block(0, 5, 0, 5), Block(5, 600, 5, 600), Block(600, 601, 600, 601)], True, 4, 2, 64),
    "rows out of order": (
        [Block(500, 700, 0, 300), Block(0, 100, 300, 310), Block(200, 201, 400, 700)],
        False,
        4,
        2,
        64,
    ),
}


def exact(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64 on the CPU."""
    group = q_THD.shape[1] // k_SGD.shape[1]
    scores = torch.einsum("thd,shd->hts", q_THD, k_SGD.repeat_interleave(group, 1)) * q_THD.shape[2] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_SGD.repeat_interleave(group, 1)), scores.logsumexp(-1).T


def error(found: Tensor, expected: Tensor) -> float:
    """Error norm relative to the expected norm."""
    return float((found.detach().cpu().double() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-30))


def inputs(num_rows: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """q, k, v, dout in bf16 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def block_errors(kernel: AttentionKernel, name: str) -> float:
    """Largest error of out, lse and the three gradients over the blocks of a case."""
    blocks, causal, heads, kv_heads, head_dim = CASES[name]
    on_cpu = inputs(701, heads, kv_heads, head_dim)
    q, k, v, dout = (x.to(kernel.device) for x in on_cpu)
    call, scale = kernel.prepare(blocks, causal=causal), head_dim**-0.5
    out, lse = kernel.forward(q, k, v, call, scale)
    final_out, final_lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=kernel.device)
    call.q.put(final_out, out)
    call.q.put(final_lse, lse.float())
    gradients = kernel.backward(QuerySide(q, final_out, final_lse, dout), k, v, call, scale)
    errors, q_at, kv_at = [], 0, 0
    for b in blocks:
        num_q, num_kv = b.q_end - b.q_begin, b.kv_end - b.kv_begin
        q64 = on_cpu[0][b.q_begin : b.q_end].double().requires_grad_()
        k64, v64 = (x[b.kv_begin : b.kv_end].double().requires_grad_() for x in on_cpu[1:3])
        expected, expected_lse = exact(q64, k64, v64, causal=causal)
        expected.backward(on_cpu[3][b.q_begin : b.q_end].double())
        errors += [error(out[q_at : q_at + num_q], expected), error(lse[q_at : q_at + num_q], expected_lse)]
        for gradient, leaf, at, n in zip(
            gradients, (q64, k64, v64), (q_at, kv_at, kv_at), (num_q, num_kv, num_kv), strict=True
        ):
            # A single key has softmax 1, and no gradient to compare with.
            if leaf.grad.norm() > 1e-6:
                errors.append(error(gradient[at : at + n], leaf.grad))
        q_at, kv_at = q_at + num_q, kv_at + num_kv
    return max(errors)


def zigzag_error(kernel: AttentionKernel, length: int = 1001, degree: int = 3) -> float:
    """One sequence cut over `degree` ranks, all played by this one: local blocks, ring blocks, merges."""
    on_cpu = inputs(length, 4, 2, 64)
    expected, expected_lse = exact(*(x.double() for x in on_cpu[:3]), causal=True)
    rows = []
    for index in range(degree):
        runs = piece_runs(length, degree, index)
        front, back = runs.front_begin, runs.back_begin
        rows.append(torch.cat([torch.arange(front, runs.front_end), torch.arange(back, runs.back_end)]))
    errors: list[float] = []
    scale = 64**-0.5
    for index in range(degree):
        q, k, v = (x[rows[index]].to(kernel.device) for x in on_cpu[:3])
        n, front = len(q), piece_runs(length, degree, index).num_front_tokens
        out, lse = kernel.forward(q, k, v, kernel.prepare([Block(0, n, 0, n)], causal=True), scale)
        out, lse = out.float().contiguous(), lse.float().contiguous()
        for source in (s for s in range(degree) if s != index):
            # Received key/value rows are views of one packed buffer, as a ring step has them.
            kv = torch.stack([x[rows[source]] for x in on_cpu[1:3]], dim=1).to(kernel.device)
            num_kv = piece_runs(length, degree, source).num_front_tokens if source < index else len(kv)
            block = Block(0 if source < index else front, n, 0, num_kv)
            call = kernel.prepare([block], causal=False)
            merge(out, lse, *kernel.forward(q, kv[:, 0], kv[:, 1], call, scale), call.q)
        errors += [error(out, expected[rows[index]]), error(lse, expected_lse[rows[index]])]
    return max(errors)


def kernel_checks(kernel: AttentionKernel) -> dict[str, Callable[[], float]]:
    """Every check of kernels by name; each returns an error."""
    checks: dict[str, Callable[[], float]] = {
        name: lambda name=name: block_errors(kernel, name)  # type: ignore[misc]
        for name in CASES
    }
    return checks | {"zig-zag, merged": lambda: zigzag_error(kernel)}


def commands(device: str, num_ranks: int, directory: Path) -> dict[str, list[str]]:
    """Command lines by name."""
    # However few ranks there are, one holds the longest sequence.
    capacity = ["--plan.tokens_per_rank", "16384"]
    steps = ["--train.steps", "4" if device == "cuda" else "1", "--train.device", device, *capacity]
    deep = ["--model.config.num_hidden_layers", "6", "--plan.strategy", "hdp-balance"]
    train = ["train", QUICKSTART, "--nproc", str(num_ranks), *steps]
    return {
        "quickstart": [*train, "--run.dir", str(directory / "quickstart")],
        "offload": [*train, *deep, "--plan.offload", "0.5", "--run.dir", str(directory / "offload")],
        "profile": [
            *("profile", QUICKSTART, "--out", str(directory / "profile.json"), "--max-length", "2048", "--rounds", "1"),
            *("--train.device", device, "--run.dir", str(directory / "profile")),
        ],
    }


def run_command(words: list[str]) -> str:
    """Empty when the command ended with 0, else its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bytescale", *words],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {COMMAND_TIMEOUT_S:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def rows(device: torch.device, num_ranks: int) -> Iterator[dict[str, Any]]:
    """One row a check; a check that raises is a row too."""
    for name, check in kernel_checks(select_kernel(device)).items():
        begin_s = time.perf_counter()
        try:
            found = check()
            passed, note = found <= TOLERANCE, f"error {found:.2e}"
        except Exception as failure:
            passed, note = False, f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        yield {"check": name, "passed": passed, "time_s": time.perf_counter() - begin_s, "note": note}
    with tempfile.TemporaryDirectory() as directory:
        for name, words in commands(device.type, num_ranks, Path(directory)).items():
            begin_s = time.perf_counter()
            note = run_command(words)
            yield {"check": name, "passed": not note, "time_s": time.perf_counter() - begin_s, "note": note}


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    num_gpus = 0 if parser.parse_args().dry else Machine.here().num_gpus
    if num_gpus == 0 and not parser.parse_args().dry:
        parser.error("this machine has no GPU; --dry runs the same code on the CPU")
    device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if num_gpus else hardware()
    found = list(rows(device, min(num_gpus, 4) or 2))
    report(f"{name}, bf16 against fp64", found)
    return 0 if all(row["passed"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
