"""A pure function over a stream, in several processes: results in order, a bounded number of items under way.

Processes are started afresh and see nothing of this one but the function and its items. Each ends when this one does,
however it ends. Invariant: results, and the first error, are those of `map`, in the same order.

Cost: starting the processes, and one copy of items and results through pipes.
"""

import multiprocessing as mp
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from bytescale.errors import RunError

ITEMS_AHEAD = 3
"""Items of each process under way at once: one that it works on, the others so that it need not wait."""

T = TypeVar("T")
R = TypeVar("R")


class _Worker:
    """The function of a worker process, set once when it starts."""

    function: Callable[[Any], Any]


def in_workers(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """`map(function, items)` in `num_workers` processes.

    Args:
        function: pure; it and its items and results are copied between processes.
        items: taken as they are needed.
        num_workers: processes, one core each.

    Raises:
        RunError: a process was ended from outside.
    """
    with ProcessPoolExecutor(num_workers, mp.get_context("spawn"), _begin, (function,)) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(_call, item))
                if len(pending) >= ITEMS_AHEAD * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                "a process that tokenises was ended from outside, perhaps for want of memory; what was done is kept, "
                "start again, with fewer data.workers if need be"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(function: Callable[[Any], Any]) -> None:
    _Worker.function = staticmethod(function)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    return _Worker.function(item)
