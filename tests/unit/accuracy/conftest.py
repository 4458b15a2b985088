"""Numbers of which some are fitted, whatever the shipped ones are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.accuracy.fit import Numbers

MATMULS_OF_A100 = "ampere,ada matmul.peak_fraction"


@pytest.fixture
def fitted_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped numbers, with the matmul rate of A100 as a fitted one: its sources are warm."""
    shipped = Numbers.shipped()
    devices = tuple(
        replace(number, source="fitted") if number.name == MATMULS_OF_A100 else number
        for number in shipped.devices
    )
    assert devices != shipped.devices
    monkeypatch.setattr(Numbers, "shipped", staticmethod(lambda: Numbers(devices, shipped.software)))
