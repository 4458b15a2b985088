"""Rows of a level of the search: blocks of strategies with what bounds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import NO_TRAFFIC, Traffic
from shardwise.strategy import StrategyTable


@dataclass(frozen=True, slots=True)
class SearchNodes:
    """Blocks: row i has the grid `of_grid[i]`, takes at least `lower_bound_s[i]` seconds and on some rank at
    least `device_bytes[i]`, and stands for `candidates[i]`.

    Fields of the table that are still open stand at the value that bounds them: optimizer states at a degree
    that all they may have divide, recomputed layers at the fewest. `traffic` is there once the sharding of
    parameters and gradients is known.
    """

    table: StrategyTable
    of_grid: NDArray[np.intp]
    lower_bound_s: NDArray[np.float64]
    device_bytes: NDArray[np.float64]
    candidates: NDArray[np.int64]
    traffic: Traffic = NO_TRAFFIC

    def __len__(self) -> int:
        return len(self.of_grid)

    def take(self, rows: Any) -> SearchNodes:
        """These rows."""
        return self.children(rows, self.table.take(rows), self.candidates[rows])

    def children(self, parent: Any, table: StrategyTable, candidates: NDArray[np.int64]) -> SearchNodes:
        """Rows of a further level: row i lies below row `parent[i]`, whose bounds it has until it is bounded
        itself."""
        traffic = self.traffic if self.traffic is NO_TRAFFIC else self.traffic.taken(parent)
        return SearchNodes(
            table,
            self.of_grid[parent],
            self.lower_bound_s[parent],
            self.device_bytes[parent],
            candidates,
            traffic,
        )

    def replaced(self, **changes: Any) -> SearchNodes:
        """The same rows with some columns changed."""
        return replace(self, **changes)

    @staticmethod
    def joined(parts: list[SearchNodes]) -> SearchNodes:
        """All rows, one part after another (at least one part; all with traffic, or none)."""
        is_open = parts[0].traffic is NO_TRAFFIC
        return SearchNodes(
            table=StrategyTable.joined([part.table for part in parts]),
            of_grid=np.concatenate([part.of_grid for part in parts]),
            lower_bound_s=np.concatenate([part.lower_bound_s for part in parts]),
            device_bytes=np.concatenate([part.device_bytes for part in parts]),
            candidates=np.concatenate([part.candidates for part in parts]),
            traffic=NO_TRAFFIC if is_open else Traffic.joined([part.traffic for part in parts]),
        )
