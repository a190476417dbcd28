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


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of up to eight gloo ranks, started at first use."""
    pool = RankPool()
    yield pool
    pool.close()
