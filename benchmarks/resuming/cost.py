"""What a checkpoint costs a step: the wait beside the copy alone, the bytes written, and the steps beside the writing.

    python -m benchmarks.resuming.cost [--megabytes 256] [--pairs 7]

The state is that of a Llama under AdamW on one rank, parameters and two moments. Waits and copies alternate in one
process, so that a change of the machine's load meets both. Steps beside the writing are counted in CPU seconds of the
training thread where cores are shared, and in wall time.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import hardware
from bytescale.checkpoint.slices import Slice
from bytescale.checkpoint.writer import CheckpointWriter

ROW = 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--megabytes", type=int, default=256)
    arguments.add_argument("--pairs", type=int, default=7)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    slices = state(chosen.megabytes)
    with tempfile.TemporaryDirectory() as name:
        print(
            json.dumps(
                {
                    **wait_and_copy(slices, Path(name), chosen.pairs),
                    **beside(slices, Path(name), chosen.pairs),
                    "hardware": hardware(),
                },
                indent=1,
            )
        )


def state(megabytes: int) -> list[Slice]:
    """Tensors of 4 MB, as many as asked, and their moments."""
    shape = (ROW, ROW)
    count = max(1, megabytes // 12)
    names = [f"{prefix}layers.{i}.weight" for i in range(count) for prefix in ("", "exp_avg/", "exp_avg_sq/")]
    return [Slice(name, shape, (0, 0), torch.randn(shape)) for name in names]


def saver(directory: Path) -> CheckpointWriter:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    return CheckpointWriter(directory, 0, 1, store, keep=1, timeout_s=60)


def wait_and_copy(slices: list[Slice], directory: Path, pairs: int) -> dict[str, float]:
    """Median wait of a save against the median time of a copy to buffers that are used again."""
    writer, buffers = saver(directory), [torch.empty_like(piece.tensor) for piece in slices]
    waits, copies = [], []
    for step in range(1, pairs + 2):
        begin_s = time.perf_counter()
        for buffer, piece in zip(buffers, slices, strict=True):
            buffer.copy_(piece.tensor)
        copies.append(time.perf_counter() - begin_s)
        waits.append(writer.save(step, slices, {"step": step}))
        writer.wait()
    (path,) = directory.glob("step-*")
    written = sum(file.stat().st_size for file in path.iterdir())
    size = sum(piece.tensor.nbytes for piece in slices)
    # The first of each touches its buffers for the first time.
    wait_s, copy_s = statistics.median(waits[1:]), statistics.median(copies[1:])
    return {
        "state_bytes": size,
        "written_over_state": written / size,
        "wait_s": wait_s,
        "copy_s": copy_s,
        "wait_over_copy": statistics.median(w / c for w, c in zip(waits[1:], copies[1:], strict=True)),
    }


def beside(slices: list[Slice], directory: Path, pairs: int) -> dict[str, float]:
    """Time of a fixed piece of training work while a checkpoint is written, against the same work alone."""
    writer = saver(directory / "beside")
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def work() -> tuple[float, float]:
        begin_s, cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(60):
            torch.mm(a, b)
        return time.perf_counter() - begin_s, time.thread_time() - cpu_s

    work()
    walls, cpus, writes = [], [], []
    for step in range(1, pairs + 1):
        alone = work()
        begin_s = time.perf_counter()
        writer.save(step, slices, {"step": step})
        during = work()
        writer.wait()
        writes.append(time.perf_counter() - begin_s)
        walls.append(during[0] / alone[0])
        cpus.append(during[1] / alone[1])
    return {
        "step_beside_writing_over_alone_wall": statistics.median(walls),
        "step_beside_writing_over_alone_cpu": statistics.median(cpus),
        "save_s": statistics.median(writes),
    }


if __name__ == "__main__":
    main()
