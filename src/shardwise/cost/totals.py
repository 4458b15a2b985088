"""What a grid costs wherever its layers lie: sums over the model, the least and the most of any layer, the
ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost.distinct import distinct_rows
from shardwise.cost.layers import GridCost, grid_cost
from shardwise.cost.memory import communicators
from shardwise.cost.nodes import Sums, block_columns, whole_sums
from shardwise.cost.price import GridCostTable, taken
from shardwise.cost.problem import Problem
from shardwise.cost.sync import ShardedBlocks, shard_degrees

WEIGHT_FIELDS = ("tp", "cp", "pp", "dp", "ep", "etp", "axis_order")
"""The fields on which weights depend, and the groups that share them."""


@dataclass(frozen=True, slots=True)
class CheapestLayers:
    """A cost of single layers, as columns: of the cheapest kind, of which the model has `count`, and of the
    next (None where all layers are alike)."""

    least: Any
    following: Any = None
    count: Any = None

    def of(self, k: Any) -> Any:
        """What k layers cost at least, whichever they are: no more than `count` are of the cheapest kind."""
        if self.following is None:
            return k * self.least
        return k * self.following - np.minimum(k, self.count) * (self.following - self.least)

    def scaled(self, factor: Any) -> CheapestLayers:
        """The same cost times a factor."""
        following = None if self.following is None else factor * self.following
        return CheapestLayers(factor * self.least, following, self.count)


def cheapest_layers_of(problem: Problem, costs: Sequence[Any]) -> CheapestLayers:
    """The cost of a layer; `costs` has one column per kind."""
    if len(costs) == 1:
        return CheapestLayers(costs[0])
    columns = np.array(np.broadcast_arrays(*costs))
    counts = np.array([problem.model.pattern.count(k) for k in range(len(costs))])
    order = np.argsort(columns, axis=0, kind="stable")
    least, following = np.take_along_axis(columns, order[:2], axis=0)
    return CheapestLayers(least, following, counts[order[0]])


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What single layers cost at least: work in all passes, forward, for either gradient, selective and full
    recomputation in seconds; bytes kept by choice, and of outputs of products; elements of weights."""

    work_s: CheapestLayers
    forward_s: CheapestLayers
    input_s: CheapestLayers
    weight_s: CheapestLayers
    selective_s: CheapestLayers
    full_s: CheapestLayers
    saved_bytes: CheapestLayers
    selective_bytes: CheapestLayers
    input_bytes: CheapestLayers
    output_bytes: CheapestLayers
    dense_weights: CheapestLayers
    expert_weights: CheapestLayers

    @property
    def are_alike(self) -> bool:
        """Whether the model has one kind of layer."""
        return self.work_s.following is None


@dataclass(frozen=True, slots=True)
class Totals:
    """Columns over grids: `whole` sums of the model, `layer` costs, the same of the `major` kind alone (None
    where layers are alike or no kind has more than half of them), the `most` of any layer, `embedding` and
    `head`.

    `hop_s` is the shortest hop, `mean_hop_s` the mean of one way from the first rank to the last.
    `temporary_bytes` are what a stage needs beside what is kept, `head_temporary_bytes` one with the head.
    """

    whole: Sums
    layer: LayerCosts
    major: LayerCosts | None
    most: Sums
    embedding: Sums
    head: Sums
    hop_s: Any
    mean_hop_s: Any
    hop_bytes: Any
    temporary_bytes: Any
    head_temporary_bytes: Any
    expert_replicas: Any
    communicators: Any


@dataclass(frozen=True)
class Grids:
    """Distinct grids with their prices and totals; `table` has one row of each."""

    table: Any
    cost: GridCost
    totals: Totals

    @cached_property
    def _packed(self) -> tuple[Any, Any]:
        """All real columns of the totals in one array, so that rows are taken from all at once; and the
        record with places in it for columns."""
        columns: list[Any] = []
        structure = _structure_of(self.totals, columns)
        grids = len(self.table.tp)
        return np.array([np.broadcast_to(column, (grids,)) for column in columns]), structure

    def costs_of(self, rows: Any) -> GridCostTable:
        """The prices of strategies that have the grids at these indices."""
        return GridCostTable(self.cost, rows)

    def totals_at(self, rows: Any) -> Totals:
        """The totals of the grids at these indices, in the shape of the indices."""
        columns, structure = self._packed
        totals: Totals = _filled(structure, np.take(columns, rows, axis=1), rows)
        return totals


def _structure_of(record: Any, columns: list[Any]) -> Any:
    """A nested record as (type, fields), real columns replaced by their place in `columns`, to which they are
    added."""
    if record is None or (isinstance(record, np.ndarray) and record.dtype.kind != "f"):
        return record
    if is_dataclass(record):
        return type(record), [_structure_of(getattr(record, f.name), columns) for f in fields(record)]
    columns.append(record)
    return len(columns) - 1


def _filled(structure: Any, columns: Any, rows: Any) -> Any:
    """The record of a form with these columns; whole numbers are taken at `rows`."""
    if isinstance(structure, int):
        return columns[structure]
    if isinstance(structure, tuple):
        return structure[0](*[_filled(part, columns, rows) for part in structure[1]])
    return None if structure is None else structure[rows]


def grids_of(problem: Problem, table: Any) -> Grids:
    """Prices and totals of a table of distinct grids."""
    grid = grid_cost(problem, table)
    return Grids(table, grid, totals_of(problem, table, grid))


def totals_of(problem: Problem, table: Any, grid: GridCost) -> Totals:
    """Totals of each grid; `table` has the rows of `grid`."""
    blocks = block_columns(grid)
    kinds = len(grid.kinds)
    each = [Sums(*blocks[:, k]) for k in range(kinds)]
    major = major_kind(problem)
    return Totals(
        whole=whole_sums(problem, blocks),
        layer=_layer_costs(problem, each),
        major=None if major is None else _layer_costs(problem, [each[major]]),
        most=Sums(*blocks[:, :kinds].max(axis=1)),
        embedding=Sums(*blocks[:, -2]),
        head=Sums(*blocks[:, -1]),
        hop_s=problem.profile.pipeline_overlap * grid.hops.shortest_s,
        mean_hop_s=problem.profile.pipeline_overlap * grid.hops.mean_s,
        hop_bytes=grid.hop_bytes,
        temporary_bytes=grid.temporaries.layer,
        head_temporary_bytes=np.maximum(grid.temporaries.layer, grid.temporaries.head),
        expert_replicas=grid.expert_replicas,
        communicators=communicators(table),
    )


def major_kind(problem: Problem) -> int | None:
    """The kind of which more than half of the layers are; None where there is none, or no other."""
    pattern = problem.model.pattern
    kinds = len(problem.model.kinds)
    return next((k for k in range(kinds) if kinds > 1 and 2 * pattern.count(k) > len(pattern)), None)


def _layer_costs(problem: Problem, kinds: Sequence[Sums]) -> LayerCosts:
    def cost(column: Callable[[Sums], Any]) -> CheapestLayers:
        return cheapest_layers_of(problem, [column(kind) for kind in kinds])

    return LayerCosts(
        work_s=cost(lambda kind: kind.forward_s + kind.input_s + kind.weight_s),
        forward_s=cost(lambda kind: kind.forward_s),
        input_s=cost(lambda kind: kind.input_s),
        weight_s=cost(lambda kind: kind.weight_s),
        selective_s=cost(lambda kind: kind.selective_s),
        full_s=cost(lambda kind: kind.full_s),
        saved_bytes=cost(lambda kind: kind.saved_bytes),
        selective_bytes=cost(lambda kind: kind.selective_bytes),
        input_bytes=cost(lambda kind: kind.input_bytes),
        output_bytes=cost(lambda kind: kind.output_bytes),
        dense_weights=cost(lambda kind: kind.dense_weights),
        expert_weights=cost(lambda kind: kind.expert_weights),
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds per microbatch that sharding adds: gathering parameters in both passes (`gathers_s`) and
    reducing gradients (`reduce_scatters_s`), of the whole model; both together of the layer with least and of
    the ends."""

    gathers_s: Any
    reduce_scatters_s: Any
    layer_s: Any
    embedding_s: Any
    head_s: Any

    def taken(self, rows: Any) -> Traffic:
        """The traffic of these rows."""
        return Traffic(*(getattr(self, f.name)[rows] for f in fields(Traffic)))

    @staticmethod
    def joined(parts: Sequence[Traffic]) -> Traffic:
        """The rows of all parts, one after another."""
        return Traffic(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Traffic)))


NO_TRAFFIC = Traffic(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TrafficTable:
    """Gathers and scatters of some grids by degree; shape (degrees, 4, grids): of the whole model, of the
    layer with least, of embedding and head."""

    degrees: Any
    gathers: Any
    reduce_scatters: Any

    def at(self, param_shard: Any, grad_shard: Any, grid: Any) -> Traffic:
        """Traffic of rows with these degrees on these grids: columns that broadcast together."""
        param, grad = np.searchsorted(self.degrees, param_shard), np.searchsorted(self.degrees, grad_shard)
        return Traffic(
            gathers_s=self.gathers[param, 0, grid],
            reduce_scatters_s=self.reduce_scatters[grad, 0, grid],
            layer_s=self.gathers[param, 1, grid] + self.reduce_scatters[grad, 1, grid],
            embedding_s=self.gathers[param, 2, grid] + self.reduce_scatters[grad, 2, grid],
            head_s=self.gathers[param, 3, grid] + self.reduce_scatters[grad, 3, grid],
        )


def traffic_table(problem: Problem, grids: Grids, used: Any, degrees: Any) -> TrafficTable:
    """The traffic of the grids at the indices `used`, for ascending degrees (1 where a grid cannot have one).

    Before overlap it depends on neither the micro-batch nor what else decides only computation.
    """
    table, cost = grids.table.take(used), taken(grids.cost, used)
    rows, of_row = distinct_rows([getattr(table, name) for name in WEIGHT_FIELDS])
    each, degree = np.tile(rows, len(degrees)), np.repeat(degrees, len(rows))
    few = table.take(each)
    own = np.where(few.dp * few.cp % degree == 0, degree, 1)
    few, few_cost = few.replaced(param_shard=own, grad_shard=own, optim_shard=own), taken(cost, each)
    dense, expert = shard_degrees(few, few_cost)
    blocks = ShardedBlocks.of(few_cost.blocks)
    moved = [
        part.reshape(len(part), len(degrees), len(rows))[:, :, of_row]
        for part in blocks.traffic_s(problem, few_cost.fabric, dense, expert)
    ]
    exposed = ShardedBlocks.of(cost.blocks).across.exposed(problem, *moved)
    counts = [problem.model.pattern.count(k) for k in range(len(cost.kinds))]
    times = np.array([*counts, 1, 1], dtype=np.float64)
    gathers, reduce_scatters = (
        np.stack([np.tensordot(times, part, 1), part[:-2].min(axis=0), part[-2], part[-1]], axis=1)
        for part in (exposed.forward_gather_s + exposed.backward_gather_s, exposed.reduce_scatter_s)
    )
    return TrafficTable(degrees, gathers, reduce_scatters)


def traffic_of(problem: Problem, grids: Grids, of_grid: Any, param_shard: Any, grad_shard: Any) -> Traffic:
    """Traffic of each row, which has the grid `of_grid[i]`: it depends on two degrees alone."""
    used, place = np.unique(of_grid, return_inverse=True)
    degrees = np.unique(np.concatenate([param_shard, grad_shard]))
    return traffic_table(problem, grids, used, degrees).at(param_shard, grad_shard, place)
