"""What became of the candidates, block by block: one block for each choice of (tp, cp, pp, dp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.search.fates import OUTCOMES, CandidateLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The candidates with these degrees, and how many of them met which fate (names of FATES; none is 0)."""

    tp: int
    cp: int
    pp: int
    dp: int
    outcomes: Mapping[str, int]

    @property
    def candidates(self) -> int:
        return sum(self.outcomes.values())


def ledger_entries(ledger: CandidateLedger) -> tuple[LedgerEntry, ...]:
    """All blocks that have candidates, the largest first; of equals by degrees."""
    entries = [
        LedgerEntry(tp=tp, cp=cp, pp=pp, dp=dp, outcomes=_named(counts))
        for (tp, cp, dp, pp), counts in ledger.by_degrees.items()
        if any(counts)
    ]
    return tuple(sorted(entries, key=lambda b: (-b.candidates, b.tp, b.cp, b.pp, b.dp)))


def ledger_totals(ledger: CandidateLedger) -> dict[str, int]:
    """Candidates of the whole space per fate, in the order of FATES."""
    return _named([sum(column) for column in zip(*ledger.by_degrees.values(), strict=True)])


def _named(counts: list[int]) -> dict[str, int]:
    return {name: count for name, count in zip(OUTCOMES, counts, strict=False) if count}
