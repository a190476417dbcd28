"""A pool of gloo ranks that tests share: started once, reused by every distributed test, bounded in every wait.

`RankPool.run(n, function, *args)` calls `function(Ranks, *args)` on ranks 0..n-1 and returns their results. A call
that exceeds its bound dumps the stacks of all ranks, ends them and fails the test; the next call starts a fresh pool.
"""

import faulthandler
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.processes import preloaded

POOL_SIZE = 8


@dataclass
class Ranks:
    """What a test function gets: its rank, and two groups over the first `size` ranks.

    `maker()` gives what `join_groups` makes groups with; they are made once, by their members, and used again.
    """

    rank: int
    size: int
    group: Any
    mesh_group: Any
    made: dict[tuple[tuple[int, ...], int], Any]

    def maker(self) -> Callable[[Any], Any]:
        """Makes the group of some ranks; asked again for the same ranks, another one."""
        asked: Counter[tuple[int, ...]] = Counter()

        def new_group(members: Any) -> Any:
            import torch.distributed as dist

            line = tuple(members)
            asked[line] += 1
            key = line, asked[line]
            if self.rank in line and key not in self.made:
                # torch would put into the name how many groups a rank has, in which the members may differ.
                name = f"{'-'.join(map(str, line))} {asked[line]}"
                with mock.patch("torch.distributed.distributed_c10d._process_group_name", return_value=name):
                    self.made[key] = dist.new_group(list(line), use_local_synchronization=True)
            return self.made.get(key)

        return new_group


def _worker(rank: int, store_path: str, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, POOL_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=POOL_SIZE)
    groups = {n: (dist.new_group(list(range(n))), dist.new_group(list(range(n)))) for n in range(1, POOL_SIZE + 1)}
    made: dict[tuple[tuple[int, ...], int], Any] = {}
    connection.send("ready")
    while (task := connection.recv()) is not None:
        size, seconds, function, args = task
        faulthandler.dump_traceback_later(seconds, exit=False)
        try:
            connection.send((True, function(Ranks(rank, size, *groups[size], made), *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


class RankPool:
    """Lazily started; `close` ends every process it started."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def _start(self) -> None:
        context = preloaded()
        store_path = str(Path(tempfile.mkdtemp()) / "store")
        for rank in range(POOL_SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(rank, store_path, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._collect(POOL_SIZE, 120.0)

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
        """Results of `function(Ranks, *args)` on ranks 0..size-1."""
        if not self._processes:
            self._start()
        for connection in self._connections[:size]:
            connection.send((size, timeout_s * 0.9, function, args))
        replies = self._collect(size, timeout_s)
        failed = {rank: text for rank, (ok, text) in enumerate(replies) if not ok}
        if failed:
            self.close()
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return [value for _, value in replies]

    def _collect(self, size: int, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, Any] = {}
        grace_s = 5.0
        while len(replies) < size:
            for rank, connection in enumerate(self._connections[:size]):
                if rank in replies:
                    continue
                try:
                    if connection.poll(0.002):
                        replies[rank] = connection.recv()
                except (EOFError, OSError):
                    replies[rank] = (False, "the process died")
                if isinstance(replies.get(rank), tuple) and not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                missing = sorted(set(range(size)) - set(replies))
                texts = [str(r[1]) for r in replies.values() if isinstance(r, tuple) and not r[0]]
                self.close()
                raise AssertionError(f"ranks {missing} did not finish in {timeout_s:.0f} s\n" + "\n".join(texts))
        return [replies[rank] for rank in range(size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._processes, self._connections = [], []
        sys.stderr.flush()
