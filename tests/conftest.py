"""Fixtures that several rooms share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import RankPool

# Before torch is imported: the distributed tests start many processes, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test is timed: a busy machine is no defect.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that workers which take a file at a time end together."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of up to eight gloo ranks, started at first use."""
    pool = RankPool()
    yield pool
    pool.close()
