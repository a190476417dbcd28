"""What communicators cost: our two fixed groups beside one group per multi-rank sequence.

python -m benchmarks.groups              about half a minute on two cores
"""

import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.common import on_ranks, report
from bytescale.runtime.p2p import PeerToPeer

RANKS = 4


def _footprint() -> tuple[int, int]:
    """(open files, threads) of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _row(name: str, before: tuple[int, int], seconds: float) -> dict[str, object]:
    files, threads = _footprint()
    return {
        "groups": name,
        "added_files_a_rank": files - before[0],
        "added_threads_a_rank": threads - before[1],
        "set_up_ms": 1e3 * seconds,
    }


def _measure(rank: int, size: int, counts: Sequence[int]) -> list[dict[str, object]]:
    dist.all_reduce(torch.zeros(1))
    rows = []
    before, begin_s = _footprint(), time.perf_counter()
    PeerToPeer(dist.new_group(), 60.0, torch.device("cpu"))
    rows.append(_row("ours: one more for attention, whatever the plan", before, time.perf_counter() - begin_s))
    for count in counts:
        dist.barrier()
        before, begin_s = _footprint(), time.perf_counter()
        for number in range(count):
            members = sorted({number % size, (number + 1) % size})
            group = dist.new_group(members)
            if rank in members:
                dist.all_reduce(torch.zeros(1), group=group)
        rows.append(_row(f"one a sequence: {count} sequences of two ranks", before, time.perf_counter() - begin_s))
    return rows


def main() -> None:
    """Print the table."""
    report(f"Process groups on {RANKS} gloo ranks", on_ranks(RANKS, _measure, (10, 50)))


if __name__ == "__main__":
    main()
