"""Runs independent cells of a figure in several processes: same results in the same order, whatever `jobs`.

A worker that dies ends the whole with concurrent.futures' error; after any error no further cell starts. Cost: a
process starts in about half a second.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

Progress = Callable[[str], None] | None


def each(function: Callable[[A], B], items: Sequence[A], jobs: int = 1, progress: Progress = None) -> list[B]:
    """`function` of every item, in order; for several jobs it must be a function of a module, or a partial of one."""
    if min(jobs, len(items)) <= 1:
        results = []
        for item in items:
            if progress is not None:
                progress(name_of(item))
            results.append(function(item))
        return results
    with ProcessPoolExecutor(min(jobs, len(items)), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(function, item): number for number, item in enumerate(items)}
        try:
            for done in as_completed(futures):
                done.result()
                if progress is not None:
                    progress(f"{name_of(items[futures[done]])} is done")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def name_of(item: object) -> str:
    """An item in words: the words of a tuple in a row."""
    return " ".join(map(str, item)) if isinstance(item, tuple) else str(item)
