"""Fixtures and settings shared by the property tests."""

from __future__ import annotations

import pytest

from shardwise.search.pareto import two_phase


@pytest.fixture
def by_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search small chains by the two-phase method too, as large ones are searched."""
    monkeypatch.setattr(two_phase, "eliminate_small_chain", lambda chain: None)
