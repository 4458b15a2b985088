"""The commands that the tests of one process share."""

from __future__ import annotations

import pytest
from tests.relations.commands import Commands


@pytest.fixture(scope="session")
def shardwise(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("relations"))
