"""What became of every candidate of a space."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shardwise.check.rows import Rows


class OutOfTimeError(Exception):
    """The proof took longer than it may."""


@dataclass(slots=True, kw_only=True)
class Cover:
    """What became of the candidates; `least_s` is the least bound or time of all that fit or may fit.

    `faster` is the fastest legal fitting candidate found below the time to be beaten, one row; `faster_s` and
    `faster_bytes` are its time and the bytes of its tightest rank.
    """

    illegal: int = 0
    unfitting: int = 0
    bounded: int = 0
    evaluated: int = 0
    least_s: float = inf
    faster: Rows | None = None
    faster_s: float = inf
    faster_bytes: float = inf

    @property
    def count(self) -> int:
        """All candidates."""
        return self.illegal + self.unfitting + self.bounded + self.evaluated
