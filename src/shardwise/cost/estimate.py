"""Costs of a table of strategies, level by level; each distinct combination of fields is estimated once.

    grids -> partitions (grid, schedule, stage split) -> activations | sharding -> rows

A row combines the `ActivationCosts` and the `ShardingCosts` of its partition. `costs_of_all_stages` serves
the step time, `costs_of_peak_stages` the peak memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cost.activations import ACTIVATION_FIELDS, ActivationCosts, activation_costs_of
from shardwise.cost.collectives import CollectiveModel
from shardwise.cost.layers import GRID_FIELDS, GridCost, grid_cost
from shardwise.cost.moments import moments_of
from shardwise.cost.problem import Index, Problem
from shardwise.cost.sharding import SHARD_FIELDS, ShardingCosts, sharding_of, shards_of
from shardwise.cost.stages import SPLIT_FIELDS, PartitionCosts, all_places, first_places, partition_costs_of

PARTITION_FIELDS = tuple(dict.fromkeys((*GRID_FIELDS, *SPLIT_FIELDS)))


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """Distinct partitions of a table with their costs and grids: partition i has grid `of_grid[i]`."""

    table: Any
    partition: PartitionCosts
    grid: GridCost
    of_grid: Any

    def take(self, rows: Any) -> PartitionTable:
        """The partitions at these rows."""
        return PartitionTable(
            self.table.take(rows), taken(self.partition, rows), self.grid, self.of_grid[rows]
        )


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Costs of every row of a table.

    Row i has partition `of_partition[i]`, activation costs `of_activations[i]` and sharding costs
    `of_shards[i]`. `activations_partition` and `shards_partition` give the partition of each of these costs.
    """

    partitions: PartitionTable
    activation_costs: ActivationCosts
    shards: ShardingCosts
    of_partition: Any
    of_activations: Any
    of_shards: Any
    activations_partition: Any
    shards_partition: Any

    @property
    def partition(self) -> PartitionCosts:
        return self.partitions.partition

    def rows(self, rows: Any) -> TableCosts:
        """The same costs for some rows of the table."""
        return replace(
            self,
            of_partition=self.of_partition[rows],
            of_activations=self.of_activations[rows],
            of_shards=self.of_shards[rows],
        )


@dataclass(frozen=True, slots=True)
class GridCostTable:
    """Grid costs that are known already, and which of them each row of a table has."""

    cost: GridCost
    of_row: Any

    def take(self, rows: Any) -> GridCostTable:
        """The same for these rows of the table."""
        return GridCostTable(self.cost, self.of_row[rows])


def costs_of_all_stages(problem: Problem, table: Any, grids: GridCostTable | None = None) -> TableCosts:
    """Costs at every stage, and memory of every rank. Rows with fewer stages than others repeat their first
    in the places beyond."""
    partitions, of_partition = _partitions(problem, table, grids, of_every_rank=True)
    return costs_of_partitions(problem, table, partitions, of_partition, slice(None))


def costs_of_peak_stages(problem: Problem, table: Any, grids: GridCostTable | None = None) -> TableCosts:
    """Costs at the first stage, and memory at the moments that decide its peak."""
    partitions, of_partition = _partitions(problem, table, grids, of_every_rank=False)
    return costs_of_partitions(problem, table, partitions, of_partition, slice(0, 1))


def _partitions(
    problem: Problem, table: Any, grids: GridCostTable | None, *, of_every_rank: bool
) -> tuple[PartitionTable, Any]:
    rows, of_partition = _distinct(problem, table, PARTITION_FIELDS)
    few = table.take(rows)
    if grids is None:
        grid_rows, of_grid = _distinct(problem, few, GRID_FIELDS)
        grid = grid_cost(problem, few.take(grid_rows))
    else:
        used, of_grid = np.unique(grids.of_row[rows], return_inverse=True)
        grid = _picked(grids.cost, used, len(grids.cost.hop_bytes))
    places = all_places(problem, few) if of_every_rank else first_places(problem, few)
    moments = moments_of(problem, few, of_every_rank=of_every_rank)
    partition = partition_costs_of(problem, few, grid, of_grid, places, moments)
    return PartitionTable(few, partition, grid, of_grid), of_partition


def costs_of_partitions(
    problem: Problem, table: Any, partitions: PartitionTable, of_partition: Any, synced: slice
) -> TableCosts:
    """Costs of rows with known partitions: row i has partition `of_partition[i]`.

    Reductions and gatherings are estimated at the places `synced` only.
    """
    activation_rows, of_activations = problem.distinct(
        [of_partition, *(getattr(table, name) for name in ACTIVATION_FIELDS)]
    )
    shard_rows, of_shards = problem.distinct([of_partition, *(getattr(table, name) for name in SHARD_FIELDS)])
    activations_partition, shards_partition = of_partition[activation_rows], of_partition[shard_rows]
    sharded = table.take(shard_rows)
    of_grid = partitions.of_grid[shards_partition]
    rows, of_sharding = problem.distinct([of_grid, *(getattr(sharded, name) for name in SHARD_FIELDS)])
    grid = _picked(partitions.grid, of_grid[rows], len(partitions.grid.hop_bytes))
    sharding = sharding_of(problem, sharded.take(rows), grid)
    return TableCosts(
        partitions=partitions,
        activation_costs=activation_costs_of(
            problem,
            table.take(activation_rows),
            partitions.partition,
            activations_partition,
            partitions.grid,
            partitions.of_grid[activations_partition],
        ),
        shards=shards_of(
            problem,
            sharded,
            partitions.partition,
            shards_partition,
            partitions.grid.fabric,
            _picked(sharding, of_sharding, len(rows)),
            synced,
        ),
        of_partition=of_partition,
        of_activations=of_activations,
        of_shards=of_shards,
        activations_partition=activations_partition,
        shards_partition=shards_partition,
    )


def _distinct(problem: Problem, table: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    return problem.distinct([getattr(table, name) for name in names])


def _picked(record: Any, rows: Index, length: int) -> Any:
    """`taken` of columns with this length; the record itself where `rows` are all of them in order."""
    return record if np.array_equal(rows, np.arange(length)) else taken(record, rows)


def taken(record: Any, rows: Any) -> Any:
    """A (nested) record of columns at these rows; other fields stay as they are."""
    if isinstance(record, np.ndarray):
        return record[..., rows]
    if isinstance(record, tuple):
        return tuple(taken(item, rows) for item in record)
    names = getattr(type(record), "__dataclass_fields__", None)  # `fields` takes longer than the columns
    if names is None or isinstance(record, CollectiveModel):
        return record
    return type(record)(**{name: taken(getattr(record, name), rows) for name in names})
