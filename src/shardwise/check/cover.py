"""What became of every candidate of a space."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shardwise.check.rows import StrategyRows


class ProofTimeLimitError(Exception):
    """The proof took longer than it may."""


@dataclass(slots=True, kw_only=True)
class ProofOutcome:
    """What became of the candidates; `lower_bound_s` is the least bound or time of all that fit or may fit.

    `counterexample` is the fastest legal fitting candidate found below the time to be beaten, one row;
    `counterexample_s` and `counterexample_bytes` are its time and the bytes of its tightest rank."""

    illegal: int = 0
    out_of_memory: int = 0
    pruned: int = 0
    evaluated: int = 0
    lower_bound_s: float = inf
    counterexample: StrategyRows | None = None
    counterexample_s: float = inf
    counterexample_bytes: float = inf

    @property
    def count(self) -> int:
        """All candidates."""
        return self.illegal + self.out_of_memory + self.pruned + self.evaluated
