"""Rows of a level of the search: blocks of strategies with what bounds them.

Rows and options side by side: parts that fit a cache, rows that are alike, counts asked once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import ACTIVATIONS, NO_TRAFFIC, Split, Traffic, distinct_rows
from shardwise.search.space import FULL, Space, Variants
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


PAIRS_PER_BATCH = 1 << 16
"""Pairs of a row and an option that are bounded together: their columns stay in the processor's cache."""

FEW_PAIRS = PAIRS_PER_BATCH // 8
"""So few that it does not pay to tell them apart."""

SPLIT_FIELDS = ("first", "last", "between", "largest")
"""The columns of a `Split`."""

BLOCK_FIELDS = (
    "pp", "microbatches", "recompute", "recompute_layers",
    "offload", "param_shard", "grad_shard", "optim_shard",
)  # fmt: skip
"""The columns of a `Block` that its row decides, and no option."""

NO_SPLIT = Split(0, 0, 0, 1)
"""Where the split is of no account."""

NO_TRAFFIC_ROWS = Traffic(*(np.zeros(0) for _ in range(5)))
"""Traffic of no row."""


def take_splits(split: Split, rows: Any) -> Split:
    """The splits of these rows."""
    return Split(*(getattr(split, name)[rows] for name in SPLIT_FIELDS))


def join_splits(parts: Sequence[Split]) -> Split:
    """All splits, one part after another."""
    return Split(*(np.concatenate([getattr(part, name) for part in parts]) for name in SPLIT_FIELDS))


def empty_like(rows: SearchNodes) -> SearchNodes:
    """No row, with every column of these."""
    return rows.take(slice(0, 0))


def alike_nodes(rows: SearchNodes, mask: Any, options: int) -> Iterator[NDArray[np.intp]]:
    """The rows under a mask. Many are told apart by whether they recompute in full and whether they offload
    activations: each needs a part of its bound that the others do not."""
    same = np.flatnonzero(mask)
    if len(same) * options < FEW_PAIRS:
        if len(same):
            yield same
        return
    is_full, offloads = rows.table.recompute[same] == FULL, rows.table.offload[same] >= ACTIVATIONS
    for full, offloading in product((False, True), (False, True)):
        few = same[(is_full == full) & (offloads == offloading)]
        if len(few):
            yield few


def slices(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` rows; one at least."""
    yield slice(0, size)
    for start in range(size, length, size):
        yield slice(start, start + size)


def map_distinct(count: Any, *columns: Any) -> NDArray[np.int64]:
    """`count` of every row of some columns, asked once per distinct row."""
    rows, of_row = distinct_rows(columns)
    each = [count(*(int(column[row]) for column in columns)) for row in rows]
    return np.array(each, dtype=np.int64)[of_row]


def legal_pairs(space: Space, pp: int, microbatches: Any, variants: Variants) -> Any:
    """Whether each row's microbatches (down) allow each schedule (across)."""
    each, of_each = np.unique(microbatches, return_inverse=True)
    pairs = list(zip(variants.schedule.tolist(), variants.vpp.tolist(), strict=True))
    rows = []
    for m in each.tolist():
        legal = space.legal_variants(pp, m)
        known = set(zip(legal.schedule.tolist(), legal.vpp.tolist(), strict=True))
        rows.append([pair in known for pair in pairs])
    return np.array(rows, dtype=bool).reshape(len(each), len(pairs))[of_each.ravel()]
