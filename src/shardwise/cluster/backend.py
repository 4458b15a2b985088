"""What the library that carries collectives between devices has, and what it does instead of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One library: by collective that it does not have, the one that it does in its place, on the same whole
    tensor."""

    name: str
    instead: Mapping[str, str] = field(hash=False)

    def substitute(self, collective: str) -> str:
        """The collective that is carried out where this one is asked for."""
        return self.instead.get(collective, collective)


NATIVE = Backend(name="native", instead={})
"""The devices' own library, which has all collectives."""
