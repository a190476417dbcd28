"""What the benchmarks share: hardware in words, paired timing, gloo ranks on this machine."""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def hardware() -> str:
    """Processor, cores and torch version."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin_s = time.perf_counter()
    function()
    return time.perf_counter() - begin_s


def paired(left: Callable[[], Any], right: Callable[[], Any], pairs: int) -> dict[str, float]:
    """Time two functions in turn, after one warm call each: minima, medians, and the median ratio left / right."""
    left(), right()
    times = [(timed(left), timed(right)) for _ in range(pairs)]
    lefts, rights = zip(*times, strict=True)
    return {
        "left_min_s": min(lefts),
        "right_min_s": min(rights),
        "ratio_of_minima": min(lefts) / min(rights),
        "median_ratio": statistics.median(a / b for a, b in times),
    }


def _rank_main(rank: int, size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    result = function(rank, size, *args)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(rank, size, *args)` on `size` single-threaded gloo ranks; returns what rank 0 returned."""
    with tempfile.TemporaryDirectory() as directory:
        store, out = f"{directory}/store", f"{directory}/out"
        mp.spawn(_rank_main, (size, store, function, args, out), nprocs=size)
        return json.loads(Path(out).read_text())


def report(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a Markdown table under the hardware line."""
    print(f"\n### {title}\n\n{hardware()}\n")
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)
