"""Rated power of devices, from their data sheets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwise.units import parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedPower:
    """The power in watts that one device may draw all the time, and the document that says so."""

    watts: float
    source: str


@cache
def rated_powers() -> Mapping[str, RatedPower]:
    """The rated power of the devices of the catalogue by name, where it is known."""
    text = Path(__file__).with_name("data").joinpath("power.json").read_text("utf-8")
    return {
        name: RatedPower(watts=parse_quantity(each["power"], "W"), source=each["source"])
        for name, each in json.loads(text)["devices"].items()
    }
