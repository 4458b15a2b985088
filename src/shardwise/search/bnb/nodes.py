"""Nodes of the branch and bound of uniform plans: subproblems with their lower bounds, as columns.

`SearchNodes` has one row per node. The helpers combine nodes with options (nodes down, options across): they
split work into batches that fit the cache, group nodes of equal kind, and call a function once per distinct
row.
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
    """Nodes of the search tree, one row each.

    Node i is below the grid `of_grid[i]` and stands for `candidates[i]` strategies. None of them takes less
    than `lower_bound_s[i]` seconds, nor less than `device_bytes[i]` bytes on the fullest rank.

    Open fields of `table` have the value that gives the lower bound: the optimizer states a sharding degree
    that all allowed degrees divide, the recomputed layers their fewest. `traffic` is known once the sharding
    of parameters and gradients is.
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
        """The selected nodes."""
        return self.children(rows, self.table.take(rows), self.candidates[rows])

    def children(self, parent: Any, table: StrategyTable, candidates: NDArray[np.int64]) -> SearchNodes:
        """Nodes of the next level. Child i has the parent `parent[i]` and inherits its bounds."""
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
        """The same nodes with some columns changed."""
        return replace(self, **changes)

    @staticmethod
    def joined(parts: list[SearchNodes]) -> SearchNodes:
        """Concatenates `parts` (at least one; all with traffic, or none)."""
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
"""Pairs of a node and an option that are bounded in one batch: their columns fit the processor's cache."""

FEW_PAIRS = PAIRS_PER_BATCH // 8
"""Pairs below which grouping nodes by kind costs more than it saves."""

SPLIT_FIELDS = ("first", "last", "between", "largest")
"""The columns of a `Split`."""

BLOCK_FIELDS = (
    "pp", "microbatches", "recompute", "recompute_layers",
    "offload", "param_shard", "grad_shard", "optim_shard",
)  # fmt: skip
"""The columns of a `Subproblem` that the node fixes, not the option."""

NO_SPLIT = Split(0, 0, 0, 1)
"""Placeholder where a bound does not use the split."""

NO_TRAFFIC_ROWS = Traffic(*(np.zeros(0) for _ in range(5)))
"""Traffic of no node."""


def take_splits(split: Split, rows: Any) -> Split:
    """The splits of the selected rows."""
    return Split(*(getattr(split, name)[rows] for name in SPLIT_FIELDS))


def join_splits(parts: Sequence[Split]) -> Split:
    """Concatenates splits."""
    return Split(*(np.concatenate([getattr(part, name) for part in parts]) for name in SPLIT_FIELDS))


def empty_like(rows: SearchNodes) -> SearchNodes:
    """No node, with the columns of `rows`."""
    return rows.take(slice(0, 0))


def alike_nodes(rows: SearchNodes, mask: Any, options: int) -> Iterator[NDArray[np.intp]]:
    """Yields the indices under `mask`, grouped by full recomputation and by activation offload.

    Each of the two adds a term to the bound that other nodes do not need. Few pairs of nodes and `options`
    form a single group.
    """
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
    """Consecutive slices of at most `size` rows; at least one."""
    yield slice(0, size)
    for start in range(size, length, size):
        yield slice(start, start + size)


def map_distinct(count: Any, *columns: Any) -> NDArray[np.int64]:
    """`count` of every row of `columns`, called once per distinct row."""
    rows, of_row = distinct_rows(columns)
    each = [count(*(int(column[row]) for column in columns)) for row in rows]
    return np.array(each, dtype=np.int64)[of_row]


def legal_pairs(space: Space, pp: int, microbatches: Any, variants: Variants) -> Any:
    """Whether the micro-batches of each row (down) allow each schedule (across)."""
    each, of_each = np.unique(microbatches, return_inverse=True)
    pairs = list(zip(variants.schedule.tolist(), variants.vpp.tolist(), strict=True))
    rows = []
    for m in each.tolist():
        legal = space.legal_variants(pp, m)
        known = set(zip(legal.schedule.tolist(), legal.vpp.tolist(), strict=True))
        rows.append([pair in known for pair in pairs])
    return np.array(rows, dtype=bool).reshape(len(each), len(pairs))[of_each.ravel()]
