"""What several of the property tests are run under."""

from __future__ import annotations

import pytest

from shardwise.search.pareto import two_phase


@pytest.fixture
def by_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chains are tracked by lines and looks, as large ones are."""
    monkeypatch.setattr(two_phase, "eliminate_small_chain", lambda chain: None)
