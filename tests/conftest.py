"""Fixtures that several rooms share."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of up to eight gloo ranks, started at first use."""
    pool = RankPool()
    yield pool
    pool.close()
