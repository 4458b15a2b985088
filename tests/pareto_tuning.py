"""Other values of the tuned constants of the Pareto search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.search.pareto import tuning


def tune(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Replace constants of `Tuning` for all modules that read them."""
    monkeypatch.setattr(tuning, "TUNING", replace(tuning.TUNING, **values))
