"""Fused and chunked head and loss beside plain logits and cross-entropy: time, and peak memory of a process each.

python -m benchmarks.loss                about half a minute on two cores
"""

import json
import subprocess
import sys

import torch

from benchmarks.common import report, timed
from bytescale.runtime.model.loss import token_loss_sum
from bytescale.train.measure.peak_memory import peak_memory_bytes, reset_peak_memory

TOKENS, HIDDEN, VOCAB = 8192, 512, 32000


def measure(kind: str, dtype: torch.dtype) -> dict[str, object]:
    """One process: best time of three and the peak above the inputs."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)

    def step() -> float:
        if kind == "fused":
            loss = token_loss_sum(hidden, weight, labels)
        else:
            logits = torch.nn.functional.linear(hidden, weight).float()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss.backward()
        return float(loss.detach())

    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    seconds = [timed(step) for _ in range(3)]
    return {
        "head and loss": kind,
        "dtype": str(dtype)[6:],
        "best_s": min(seconds),
        "peak_MiB_above_inputs": (peak_memory_bytes(cpu) - before) / 2**20,
        "loss_sum": step(),
    }


def main() -> None:
    """Measure each combination in its own process, because freed memory stays resident."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], getattr(torch, sys.argv[2]))))
        return
    rows = []
    for dtype in ("float32", "bfloat16"):
        for kind in ("plain", "fused"):
            command = [sys.executable, "-m", "benchmarks.loss", kind, dtype]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    report(f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCAB}, two threads", rows)


if __name__ == "__main__":
    main()
