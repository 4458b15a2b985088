"""What became of every candidate: counted exactly, by fate and by the degrees it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.strategy import REASONS, StrategyTable

LEVELS = ("degrees", "micro_batch", "kept", "family", "sharded", "schedule", "split", "layers", "states")
"""Where a block may be cut by its bound, coarsest first: named after what was chosen last."""

SIMULATED = "simulated"
FATES = (*REASONS, *(f"cut_{level}" for level in LEVELS), SIMULATED)
FATE = {name: index for index, name in enumerate(FATES)}

Degrees = tuple[int, int, int, int]


@dataclass
class Fates:
    """Candidates per fate below each of some rows (of a table of grids); `bounded` blocks were compared with
    what is known."""

    counts: NDArray[np.int64]
    bounded: int = 0

    @staticmethod
    def of(rows: int) -> Fates:
        """Nothing counted yet."""
        return Fates(np.zeros((len(FATES), rows), dtype=np.int64))

    def add(self, fate: str, rows: NDArray[np.intp], candidates: NDArray[np.int64]) -> None:
        """Adds candidates below these rows."""
        np.add.at(self.counts[FATE[fate]], rows, candidates)


@dataclass
class Ledger:
    """Candidates per fate for each choice of (tp, cp, dp, pp), integers without limit; blocks whose bounds
    were compared with what was known."""

    by_degrees: dict[Degrees, list[int]] = field(default_factory=dict)
    bounded: int = 0

    def add(self, table: StrategyTable, fates: Fates) -> None:
        """Adds the candidates below the rows of a table of grids."""
        self.bounded += fates.bounded
        first, of_each = distinct_rows([table.tp, table.cp, table.dp, table.pp])
        order = np.argsort(of_each, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(of_each))])
        counts = fates.counts[:, order]
        for index, row in enumerate(first.tolist()):
            key = (int(table.tp[row]), int(table.cp[row]), int(table.dp[row]), int(table.pp[row]))
            mine = self.by_degrees.setdefault(key, [0] * len(FATES))
            for fate, count in enumerate(_sums(counts[:, starts[index] : starts[index + 1]])):
                mine[fate] += count

    def merge(self, other: Ledger) -> None:
        """Adds another ledger's candidates."""
        self.bounded += other.bounded
        for degrees, counts in other.by_degrees.items():
            mine = self.by_degrees.setdefault(degrees, [0] * len(FATES))
            for fate, count in enumerate(counts):
                mine[fate] += count

    def count(self, fate: str) -> int:
        """Candidates of a fate."""
        return sum(counts[FATE[fate]] for counts in self.by_degrees.values())

    @property
    def rejected(self) -> dict[str, int]:
        """Candidates per reason code, in the fixed order of the codes."""
        return {code: count for code in REASONS if (count := self.count(code))}

    @property
    def cut(self) -> int:
        """Candidates cut by a bound."""
        return sum(self.count(f"cut_{level}") for level in LEVELS)

    @property
    def simulated(self) -> int:
        return self.count(SIMULATED)

    @property
    def total(self) -> int:
        return sum(map(sum, self.by_degrees.values()))


def _sums(counts: NDArray[np.int64]) -> Iterable[int]:
    """Row sums as integers without limit: halves first, which cannot overflow."""
    low, high = counts & 0xFFFFFFFF, counts >> 32
    return (
        int(h) * 2**32 + int(n)
        for h, n in zip(high.sum(axis=1, dtype=np.int64), low.sum(axis=1, dtype=np.int64), strict=True)
    )
