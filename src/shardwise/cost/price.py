"""What a table of strategies costs, level by level, each priced once per distinct combination of its fields.

    grids -> nodes (grid, schedule, stage split) -> what is kept | what is sharded -> rows

A row is one choice of each: it joins a `Keeping` and `Shards` of its node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cost.distinct import Index
from shardwise.cost.fabric import Fabric
from shardwise.cost.keeping import KEEP_FIELDS, Keeping, keeping_of
from shardwise.cost.layers import GRID_FIELDS, GridCost, grid_cost
from shardwise.cost.nodes import Node, node_of
from shardwise.cost.places import SPLIT_FIELDS, all_places, peak_places
from shardwise.cost.problem import Problem
from shardwise.cost.sync import SHARD_FIELDS, Shards, sharding_of, shards_of

NODE_FIELDS = tuple(dict.fromkeys((*GRID_FIELDS, *SPLIT_FIELDS)))


@dataclass(frozen=True, slots=True)
class Nodes:
    """Priced nodes of a table, with their grids: node i has grid `of_grid[i]`."""

    table: Any
    node: Node
    grid: GridCost
    of_grid: Any

    def take(self, rows: Any) -> Nodes:
        """The nodes at these rows."""
        return Nodes(self.table.take(rows), taken(self.node, rows), self.grid, self.of_grid[rows])


@dataclass(frozen=True, slots=True)
class Price:
    """Costs of every row of a table: row i has node `of_node[i]`, keeping `of_keeping[i]`, shards
    `of_shards[i]`.

    `keeping_node` and `shards_node` say which node each keeping and each sharding belongs to.
    """

    nodes: Nodes
    keeping: Keeping
    shards: Shards
    of_node: Any
    of_keeping: Any
    of_shards: Any
    keeping_node: Any
    shards_node: Any

    @property
    def node(self) -> Node:
        return self.nodes.node

    def rows(self, rows: Any) -> Price:
        """The same prices for some rows of the table."""
        return replace(
            self, of_node=self.of_node[rows], of_keeping=self.of_keeping[rows], of_shards=self.of_shards[rows]
        )


@dataclass(frozen=True, slots=True)
class GridPrices:
    """Prices of grids that are known already, and which of them each row of a table has."""

    cost: GridCost
    of_row: Any

    def take(self, rows: Any) -> GridPrices:
        """The same for these rows of the table."""
        return GridPrices(self.cost, self.of_row[rows])


def price_everywhere(problem: Problem, table: Any, grids: GridPrices | None = None) -> Price:
    """Prices at every stage; rows with fewer stages than others repeat their first in the places beyond."""
    nodes, of_node = _nodes(problem, table, all_places, grids)
    return price_below(problem, table, nodes, of_node, slice(None))


def price_peaks(problem: Problem, table: Any, grids: GridPrices | None = None) -> Price:
    """Prices at the places that decide the peak of memory; the first place is the first stage."""
    nodes, of_node = _nodes(problem, table, peak_places, grids)
    return price_below(problem, table, nodes, of_node, slice(0, 1))


def _nodes(problem: Problem, table: Any, places_of: Any, grids: GridPrices | None) -> tuple[Nodes, Any]:
    rows, of_node = _distinct(problem, table, NODE_FIELDS)
    few = table.take(rows)
    if grids is None:
        grid_rows, of_grid = _distinct(problem, few, GRID_FIELDS)
        grid = grid_cost(problem, few.take(grid_rows))
    else:
        used, of_grid = np.unique(grids.of_row[rows], return_inverse=True)
        grid = _picked(grids.cost, used, len(grids.cost.hop_bytes))
    return Nodes(few, node_of(problem, few, grid, of_grid, places_of(problem, few)), grid, of_grid), of_node


def price_below(problem: Problem, table: Any, nodes: Nodes, of_node: Any, synced: slice) -> Price:
    """Prices of rows whose nodes are known: row i has node `of_node[i]`."""
    keep_rows, of_keeping = problem.distinct([of_node, *(getattr(table, name) for name in KEEP_FIELDS)])
    shard_rows, of_shards = problem.distinct([of_node, *(getattr(table, name) for name in SHARD_FIELDS)])
    keeping_node, shards_node = of_node[keep_rows], of_node[shard_rows]
    sharded = table.take(shard_rows)
    of_grid = nodes.of_grid[shards_node]
    rows, of_sharding = problem.distinct([of_grid, *(getattr(sharded, name) for name in SHARD_FIELDS)])
    grid = _picked(nodes.grid, of_grid[rows], len(nodes.grid.hop_bytes))
    sharding = sharding_of(problem, sharded.take(rows), grid)
    return Price(
        nodes=nodes,
        keeping=keeping_of(problem, table.take(keep_rows), nodes.node, keeping_node),
        shards=shards_of(
            problem,
            sharded,
            nodes.node,
            shards_node,
            nodes.grid.fabric,
            _picked(sharding, of_sharding, len(rows)),
            synced,
        ),
        of_node=of_node,
        of_keeping=of_keeping,
        of_shards=of_shards,
        keeping_node=keeping_node,
        shards_node=shards_node,
    )


def _distinct(problem: Problem, table: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    return problem.distinct([getattr(table, name) for name in names])


def _picked(record: Any, rows: Index, length: int) -> Any:
    """`taken`, of columns of this length; the record itself where it is all of them in their order."""
    return record if np.array_equal(rows, np.arange(length)) else taken(record, rows)


def taken(record: Any, rows: Any) -> Any:
    """A (nested) record of columns at these rows; what is not a column stays as it is."""
    if isinstance(record, np.ndarray):
        return record[..., rows]
    if isinstance(record, tuple):
        return tuple(taken(item, rows) for item in record)
    names = getattr(type(record), "__dataclass_fields__", None)  # `fields` takes longer than the columns
    if names is None or isinstance(record, Fabric):
        return record
    return type(record)(**{name: taken(getattr(record, name), rows) for name in names})
