"""Fixtures of the tests that start whole runs."""

from collections.abc import Callable, Iterator

import pytest

from tests.processes import CommandProcess
from tests.train.runs import start


@pytest.fixture
def begin() -> Iterator[Callable[..., CommandProcess]]:
    """`begin(words)` starts `bytescale train`; it is killed at the end of the test, and its ranks with it."""
    started: list[CommandProcess] = []

    def begin(*arguments: object) -> CommandProcess:
        started.append(start(*arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
