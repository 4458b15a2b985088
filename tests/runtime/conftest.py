"""One team of workers for all runtime tests: starting a process with PyTorch costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.runtime import Team

WORKERS = 8


@pytest.fixture(scope="session")
def _team_of_session() -> Iterator[Team]:
    with Team(WORKERS) as team:
        yield team


@pytest.fixture
def team(_team_of_session: Team) -> Team:
    """Workers that have no work; they are started again where a test before has ended them."""
    return _team_of_session
