"""A pure function over a stream, in several processes: results in order, a bounded number of items under way.

Item i goes to process i mod n and its result is taken from there, so results, and the first error, are those of `map`,
in the same order. Processes are started afresh and see nothing of this one but the function and its items; each ends
when this one does, however it ends, since its pipe ends then.

Cost: starting the processes, and one copy of items and results through pipes.
"""

import multiprocessing as mp
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from bytescale.errors import RunError, UserError

ITEMS_AHEAD = 3
"""Items of each process under way at once: one that it works on, the others so that it need not wait."""

T = TypeVar("T")
R = TypeVar("R")


def in_workers(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """`map(function, items)` in `num_workers` processes.

    Args:
        function: pure; it and its items and results are copied between processes.
        items: taken as they are needed.
        num_workers: processes, one core each.

    Raises:
        UserError: one that `function` raised.
        RunError: a process was ended from outside.
    """
    with ExitStack() as stack:
        workers = [_start(function, stack) for _ in range(num_workers)]
        waiting: deque[Connection[Any, Any]] = deque()
        try:
            for number, item in enumerate(items):
                worker = workers[number % num_workers]
                worker.send(item)
                waiting.append(worker)
                if len(waiting) >= ITEMS_AHEAD * num_workers:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        except (EOFError, ConnectionError):
            raise RunError(
                "a process that tokenises was ended from outside, perhaps for want of memory; what was done is kept, "
                "start again, with fewer data.workers if need be"
            ) from None


def _start(function: Callable[[T], R], stack: ExitStack) -> "Connection[Any, Any]":
    """The pipe to a new process, which `stack` ends."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(function, there), daemon=True)
    process.start()
    there.close()
    stack.callback(_end, process, here)
    return here


def _end(process: BaseProcess, connection: "Connection[Any, Any]") -> None:
    connection.close()
    process.kill()
    process.join()


def _result(worker: "Connection[Any, Any]") -> Any:
    succeeded, value = worker.recv()
    if not succeeded:
        raise value
    return value


def _work(function: Callable[[Any], Any], connection: "Connection[Any, Any]") -> None:
    """The life of a process: items in, results out, in order."""
    # Whoever interrupts the run speaks to the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    items: queue.Queue[Any] = queue.Queue()
    # Items are taken off the pipe at once: two processes that only send would wait for each other.
    threading.Thread(target=_receive, args=(connection, items), daemon=True).start()
    while True:
        item = items.get()
        try:
            answer = (True, function(item))
        except UserError as error:
            answer = (False, error)
        except Exception:
            answer = (False, RuntimeError(traceback.format_exc()))
        connection.send(answer)


def _receive(connection: "Connection[Any, Any]", items: "queue.Queue[Any]") -> None:
    try:
        while True:
            items.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
