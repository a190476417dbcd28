"""Offloading to disk on one CPU rank: peak memory, memory after the step, and time, at ratios 0, 0.5 and 1.

    PYTHONPATH=src python -m benchmarks.offload [--steps 5] [--length 8192] [--threads 1] [--dir DIR]

Every row runs in a process of its own, so that no allocator state is carried over. Ratio 0 runs twice: without any
allocator setting, as a run without offloading does, and with the one that the product makes while it offloads. Memory
is the peak resident set above the model (weights and gradients). `allowed` is 1.10 times (compute without offloading +
busy time of the copy threads).

`cpu` columns are the CPU time of the compute thread: on a machine that others use they say more than wall time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import report
from bytescale.config.schema import ModelConfig
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.model.decoder import LossModel, build_decoder
from bytescale.runtime.model.hf_config import load_model_config
from bytescale.runtime.offload.disk import DiskTier, release_freed_memory
from bytescale.runtime.offload.offloader import Offloader
from bytescale.runtime.p2p import PeerToPeer
from bytescale.train.measure.peak_memory import peak_memory_bytes, reset_peak_memory

MIB = 1 << 20
CPU = torch.device("cpu")


def one_ratio(
    ratio: float, num_steps: int, length: int, threads: int, layers: int, directory: Path, *, released: bool
) -> dict[str, Any]:
    """Steps of forward and backward at one ratio; the first one warms up."""
    torch.set_num_threads(threads)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    table = {"model_type": "llama", "vocab_size": 272, "num_hidden_layers": layers, **sizes}
    model_config = ModelConfig(config=table)
    model = LossModel(build_decoder(model_config, load_model_config(model_config, length), 0)).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    context = AttentionContext(local_work([length]), CpuKernel(), PeerToPeer(None, 1.0, CPU))
    tokens_T, positions_T = torch.arange(length) % 256, torch.arange(length)
    if released:
        release_freed_memory()
    offloader = Offloader(model, lambda: DiskTier(directory, 64 << 30), MIB)
    base = _resident_bytes()
    steps = []
    for _ in range(num_steps + 1):
        reset_peak_memory(CPU)
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        offloader.begin_step()
        with offloader.micro_batch([length], [ratio]):
            loss = model(tokens_T, tokens_T, positions_T, context)
        loss.backward()
        wall_s, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        del loss
        moved = offloader.report()
        steps.append(
            {
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "busy_s": sum(c.duration_s for c in moved.copies),
                "exposed_s": moved.exposed_s,
                "moved_mib": moved.bytes_out / MIB,
                "peak_mib": (peak_memory_bytes(CPU) - base) / MIB,
                "after_mib": (_resident_bytes() - base) / MIB,
            }
        )
    offloader.close()
    best = min(steps[1:], key=lambda step: step["wall_s"])
    return {
        "ratio": ratio,
        **{name: best[name] for name in ("wall_s", "busy_s", "exposed_s", "moved_mib")},
        "cpu_s": min(step["cpu_s"] for step in steps[1:]),
        "peak_mib": max(step["peak_mib"] for step in steps),
        "after_mib": max(step["after_mib"] for step in steps[1:]),
        "model_mib": base / MIB,
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--released", action="store_true", help="make the allocator setting from the start")
    parser.add_argument("--ratio", type=float, help="measure this ratio in this process and print JSON")
    asked = parser.parse_args()
    if asked.ratio is not None:
        sizes = asked.steps, asked.length, asked.threads, asked.layers
        row = one_ratio(asked.ratio, *sizes, asked.dir, released=asked.released)
        print(json.dumps(row))
        return
    rows: list[dict[str, Any]] = []
    for ratio, released in ((0.0, False), (0.0, True), (0.5, False), (1.0, False)):
        words = [f"--{name}={getattr(asked, name)}" for name in ("steps", "length", "layers", "threads", "dir")]
        command = [sys.executable, "-m", "benchmarks.offload", f"--ratio={ratio}", *["--released"] * released, *words]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        plain = rows[0] if rows else row
        row = {"setting": "off" if not rows else "on", **row}
        row["saved_percent"] = 100 * (1 - row["peak_mib"] / plain["peak_mib"])
        row["allowed_s"] = 1.10 * (plain["wall_s"] + row["busy_s"])
        rows.append(row)
    report(f"Offloading to disk: {asked.layers} layers, {asked.length} tokens, {asked.threads} compute threads", rows)


if __name__ == "__main__":
    main()
