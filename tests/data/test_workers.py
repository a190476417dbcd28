import os
import time
from collections.abc import Iterator

import pytest

from bytescale.data.workers import in_workers
from bytescale.errors import RunError, UserError


def work(item: int) -> bytes:
    """More than a pipe holds, and sooner for odd items."""
    if item == 7:
        raise UserError("item 7 is bad")
    if item == 11:
        os._exit(9)
    if item == 13:
        raise KeyError("thirteen")
    time.sleep(0.01 * (item % 2))
    return bytes([item]) * 200_000


def test_results_come_in_order_and_items_as_they_are_needed() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in (n for n in range(40) if n not in (7, 11, 13)):
            taken.append(item)
            yield item

    results = in_workers(work, items(), 2)
    assert next(results)[0] == 0
    assert len(taken) == 6
    assert [result[0] for result in results] == taken[1:]


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [(7, UserError, "item 7 is bad"), (11, RunError, "ended from outside"), (13, RuntimeError, "thirteen")],
)
def test_the_first_error_comes_after_the_results_before_it(bad: int, kind: type[Exception], words: str) -> None:
    results = in_workers(work, [1, 2, 3, bad, 7], 2)
    assert [next(results)[0] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(kind, match=words):
        next(results)
