"""One team of workers for the runtime tests of a process: starting one with PyTorch costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.runtime import WorkerPool

WORKERS = 8


@pytest.hookimpl(tryfirst=True)  # before the plugin that hands groups out reads them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together: they share what they hold others against, and few processes of
    tests have a team at a time."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random tensors do not depend on the tests that ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _team_of_session() -> Iterator[WorkerPool]:
    with WorkerPool(WORKERS) as team:
        yield team


@pytest.fixture
def team(_team_of_session: WorkerPool) -> WorkerPool:
    """Workers that have no work; they are started again where a test before has ended them."""
    return _team_of_session
