"""Ledger of the search: the outcome of every candidate, counted exactly.

Outcomes are the reason codes of rejected candidates, `cut_<level>` (pruned at a level), and `simulated`
(evaluated). `CandidateLedger` has their counts for each choice of (tp, cp, dp, pp); `LedgerEntry` is one such
choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.strategy import REASONS, StrategyTable

LEVELS = ("degrees", "micro_batch", "kept", "family", "sharded", "schedule", "split", "layers", "states")
"""Levels at which a node may be pruned, from the root down, each named after the choice made last."""

SIMULATED = "simulated"
OUTCOMES = (*REASONS, *(f"cut_{level}" for level in LEVELS), SIMULATED)
OUTCOME_INDEX = {name: index for index, name in enumerate(OUTCOMES)}

Degrees = tuple[int, int, int, int]
DEGREES = ("tp", "cp", "dp", "pp")
"""The degrees that a ledger has separate counts for."""


@dataclass
class OutcomeCounts:
    """Candidates per outcome (down) below each row of a table of grids (across). `bounded_nodes` counts the
    nodes whose bounds were compared with the incumbents."""

    counts: NDArray[np.int64]
    bounded_nodes: int = 0

    @staticmethod
    def of(rows: int) -> OutcomeCounts:
        """Zero counts."""
        return OutcomeCounts(np.zeros((len(OUTCOMES), rows), dtype=np.int64))

    def add(self, outcome: str, rows: NDArray[np.intp], candidates: NDArray[np.int64]) -> None:
        """Adds candidates below the grids `rows`."""
        np.add.at(self.counts[OUTCOME_INDEX[outcome]], rows, candidates)


@dataclass
class CandidateLedger:
    """Candidates per outcome for each choice of (tp, cp, dp, pp), as unbounded integers. `bounded_nodes`
    counts the nodes whose bounds were compared with the incumbents."""

    by_degrees: dict[Degrees, list[int]] = field(default_factory=dict)
    bounded_nodes: int = 0

    def entry(self, degrees: Degrees) -> list[int]:
        """The mutable counts of these degrees, by outcome."""
        return self.by_degrees.setdefault(degrees, [0] * len(OUTCOMES))

    def add(self, table: StrategyTable, outcomes: OutcomeCounts) -> None:
        """Adds the candidates below each row of a table of grids."""
        self.bounded_nodes += outcomes.bounded_nodes
        columns = [getattr(table, name) for name in DEGREES]
        for degrees, counts in _by_degrees(columns, outcomes.counts):
            mine = self.entry(degrees)
            for outcome, count in enumerate(counts):
                mine[outcome] += count

    def add_below(self, outcome: str, table: StrategyTable, rows: Any, candidates: NDArray[np.int64]) -> None:
        """Adds candidates with one outcome below some rows of a table of grids."""
        columns = [getattr(table, name)[rows] for name in DEGREES]
        for degrees, (count,) in _by_degrees(columns, candidates[None]):
            self.entry(degrees)[OUTCOME_INDEX[outcome]] += count

    def merge(self, other: CandidateLedger) -> None:
        """Adds another ledger's candidates."""
        self.bounded_nodes += other.bounded_nodes
        for degrees, counts in other.by_degrees.items():
            mine = self.entry(degrees)
            for outcome, count in enumerate(counts):
                mine[outcome] += count

    def count(self, outcome: str) -> int:
        """Candidates with an outcome."""
        return sum(counts[OUTCOME_INDEX[outcome]] for counts in self.by_degrees.values())

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected candidates by reason code, in the fixed order of the codes."""
        return {code: count for code in REASONS if (count := self.count(code))}

    @property
    def pruned(self) -> int:
        """Candidates pruned by a bound."""
        return sum(self.count(f"cut_{level}") for level in LEVELS)

    @property
    def simulated(self) -> int:
        """Candidates evaluated."""
        return self.count(SIMULATED)

    @property
    def total(self) -> int:
        """All candidates."""
        return sum(map(sum, self.by_degrees.values()))


def _by_degrees(
    columns: Sequence[NDArray[np.int64]], counts: NDArray[np.int64]
) -> Iterator[tuple[Degrees, list[int]]]:
    """Sums `counts`, of shape (outcomes, rows), over the rows with the same degrees."""
    first, of_each = distinct_rows(columns)
    ordered = counts[:, np.argsort(of_each, kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(of_each, minlength=len(first)))])
    for index, row in enumerate(first.tolist()):
        tp, cp, dp, pp = (int(column[row]) for column in columns)
        yield (tp, cp, dp, pp), list(_sums(ordered[:, starts[index] : starts[index + 1]]))


def _sums(counts: NDArray[np.int64]) -> Iterable[int]:
    """Row sums as unbounded integers: both halves of the bits are summed apart, which cannot overflow."""
    low, high = counts & 0xFFFFFFFF, counts >> 32
    return (
        int(h) * 2**32 + int(n)
        for h, n in zip(high.sum(axis=1, dtype=np.int64), low.sum(axis=1, dtype=np.int64), strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The candidates with these degrees, by outcome (names of OUTCOMES; no count is 0)."""

    tp: int
    cp: int
    pp: int
    dp: int
    outcomes: Mapping[str, int]

    @property
    def candidates(self) -> int:
        return sum(self.outcomes.values())


def ledger_entries(ledger: CandidateLedger) -> tuple[LedgerEntry, ...]:
    """The degrees that have candidates, most candidates first, ties by degrees."""
    entries = [
        LedgerEntry(tp=tp, cp=cp, pp=pp, dp=dp, outcomes=_named(counts))
        for (tp, cp, dp, pp), counts in ledger.by_degrees.items()
        if any(counts)
    ]
    return tuple(sorted(entries, key=lambda b: (-b.candidates, b.tp, b.cp, b.pp, b.dp)))


def ledger_totals(ledger: CandidateLedger) -> dict[str, int]:
    """Candidates of the whole space by outcome, in the order of OUTCOMES."""
    return _named([sum(column) for column in zip(*ledger.by_degrees.values(), strict=True)])


def _named(counts: list[int]) -> dict[str, int]:
    return {name: count for name, count in zip(OUTCOMES, counts, strict=False) if count}
