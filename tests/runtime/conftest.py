"""One worker pool for all runtime tests of a process: to start one with PyTorch takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.runtime import WorkerPool

WORKERS = 8


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file on one pytest worker: they share reference runs, and few pytest workers have
    a pool at a time."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Makes random tensors independent of the tests that ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _team_of_session() -> Iterator[WorkerPool]:
    with WorkerPool(WORKERS) as team:
        yield team


@pytest.fixture
def team(_team_of_session: WorkerPool) -> WorkerPool:
    """Idle workers; started again where an earlier test has ended them."""
    return _team_of_session
