"""What several of the property tests are run under."""

from __future__ import annotations

import pytest

from shardwise.search.tracking import track


@pytest.fixture
def by_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chains are tracked by lines and looks, as large ones are."""
    monkeypatch.setattr(track, "eliminate_small_chain", lambda chain: None)
