"""Head and loss: ours beside plain logits and cross-entropy and beside torch's own chunked operation.

CPU time, and peak memory of a process each.

python -m benchmarks.loss                two minutes on one core
"""

import json
import subprocess
import sys
import time

import torch
from torch.nn import LinearCrossEntropyOptions

from benchmarks.common import report
from bytescale.runtime.model.loss import token_loss_sum
from bytescale.train.measure.peak_memory import peak_memory_bytes, reset_peak_memory

TOKENS, HIDDEN, VOCAB = 4096, 512, 32000


def measure(kind: str, dtype: torch.dtype) -> dict[str, object]:
    """One process, one thread: the better of two times, and the peak above the inputs."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)

    def loss() -> torch.Tensor:
        if kind == "ours":
            return token_loss_sum(hidden, weight, labels)
        if kind == "torch, chunked":
            if dtype == torch.float32:
                return torch.nn.functional.linear_cross_entropy(hidden, weight, labels, reduction="sum")
            # The default policy multiplies 16-bit matrices several times slower on a CPU than this one.
            options = LinearCrossEntropyOptions(acc_policy="accurate")
            rows = torch.nn.functional.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)
            return rows.float().sum()
        logits = torch.nn.functional.linear(hidden, weight).float()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def step() -> tuple[float, float]:
        hidden.grad = weight.grad = None
        begin_s = time.process_time()
        value = loss()
        value.backward()
        return time.process_time() - begin_s, float(value.detach())

    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    steps = [step() for _ in range(2)]
    return {
        "head and loss": kind,
        "dtype": str(dtype)[6:],
        "cpu_s": min(seconds for seconds, _ in steps),
        "peak_MiB_above_inputs": (peak_memory_bytes(cpu) - before) / 2**20,
        "loss_sum": steps[0][1],
    }


def main() -> None:
    """Measure each combination in its own process, because freed memory stays resident."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], getattr(torch, sys.argv[2]))))
        return
    rows = []
    for dtype in ("float32", "bfloat16"):
        for kind in ("plain", "torch, chunked", "ours"):
            command = [sys.executable, "-m", "benchmarks.loss", kind, dtype]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    report(f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCAB}, one thread", rows)


if __name__ == "__main__":
    main()
