"""What the library that carries collectives between devices has, and what it does instead of the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One library: by collective that it does not have, the one that it does in its place, on the same whole
    tensor."""

    name: str
    instead: Mapping[str, str] = field(hash=False)

    def does(self, collective: str) -> str:
        """The collective that is carried out where this one is asked for."""
        return self.instead.get(collective, collective)


NATIVE = Backend(name="native", instead={})
"""The device's own library (NCCL and its like), which has all collectives."""


def backend_of(devices: Iterable[str]) -> Backend:
    """The library between devices of these names, by the files that say which devices they serve."""
    return _backend_of(frozenset(devices))


@cache
def _backend_of(devices: frozenset[str]) -> Backend:
    folder = Path(__file__).with_name("data") / "backends"
    for path in sorted(folder.glob("*.json")):
        # The package's own files, so read without the checks that users' files need.
        record = json.loads(path.read_text("utf-8"))
        if devices <= set(record["devices"]):
            return Backend(name=record["backend"], instead=record["instead"])
    return NATIVE
