"""Subproblems of the search, and the costs that hold for everything in them.

A `Subproblem` is a box of strategies with one grid and schedule; stage splits, recomputed layers and sharding
degrees may be open. `LayerCounts` are the fewest layers on its stages and ranks. `Totals` are costs of a grid
whatever the split: sums over the model, the least and the most of any layer, and the ends of the model.
`Traffic` is the exposed communication of sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost.estimate import GridCostTable, taken
from shardwise.cost.layers import GridCost, grid_cost
from shardwise.cost.memory import communicators_of
from shardwise.cost.module_costs import RECOMPUTED, SAVED, SECONDS, SelectiveRows
from shardwise.cost.problem import Problem, distinct_rows
from shardwise.cost.sharding import ShardedBlocks, shard_degrees
from shardwise.cost.stages import IS_SPLIT, Sums, block_columns, whole_sums
from shardwise.strategy import IS_V, largest_stage

# Subproblems and their layer counts


@dataclass(frozen=True, slots=True)
class Split:
    """Stage splits as columns: fewest layers on the first stage, on the last, on all others together.

    `largest` is the most layers on any stage. A known split has its exact numbers.
    """

    first: Any
    last: Any
    between: Any
    largest: Any


def known_split(layers: int, stages: Any, first: Any, last: Any) -> Split:
    """Splits with known first and last stages."""
    between = np.where(stages > 2, layers - first - last, 0)
    return Split(first, last, between, largest_stage(layers, stages, first, last))


@dataclass(frozen=True, slots=True)
class Subproblem:
    """Subproblems as columns that broadcast together.

    Under full recomputation, `recompute_layers` is the least number of recomputed layers per stage and
    `recompute_most` the largest. The sharding degrees are the largest of the subproblem: memory falls with
    each of them, time with `optim_shard`. The time that `param_shard` and `grad_shard` cost is in a separate
    `Traffic`. Where sharding is open (`is_open`), gathered copies of parameters do not count, because
    parameters may be unsharded.
    """

    pp: Any
    vpp: Any
    schedule: Any
    microbatches: Any
    recompute: Any
    recompute_layers: Any
    recompute_most: Any
    offload: Any
    param_shard: Any
    grad_shard: Any
    optim_shard: Any
    split: Split
    is_open: bool = False

    @property
    def stages(self) -> Any:
        return self.pp * self.vpp


def most_sharded(subproblem: Subproblem, ranks: Any) -> Subproblem:
    """The subproblem with open sharding over up to `ranks` ranks, at the fewest bytes."""
    return replace(subproblem, param_shard=ranks, grad_shard=ranks, optim_shard=ranks, is_open=True)


def subproblem_of(problem: Problem, table: Any, split: Split, recompute_most: Any = None) -> Subproblem:
    """The subproblem of every row of a table, apart from its split.

    The row's `recompute_layers` are the fewest recomputed layers, or without `recompute_most` the only
    number.
    """
    return Subproblem(
        pp=table.pp,
        vpp=table.vpp,
        schedule=table.schedule,
        microbatches=problem.job.global_batch_size // (table.dp * table.micro_batch_size),
        recompute=table.recompute,
        recompute_layers=table.recompute_layers,
        recompute_most=table.recompute_layers if recompute_most is None else recompute_most,
        offload=table.offload,
        param_shard=table.param_shard,
        grad_shard=table.grad_shard,
        optim_shard=table.optim_shard,
        split=split,
    )


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Fewest layers on stages and ranks of a subproblem.

    `least` is per stage between the ends, `least_first` and `least_last` per stage of the first and of the
    last rank. For the first rank, the second, the last but one and the last: all of the rank's layers
    (`on_*`), and those of its fullest stage between the ends (`full_*`; 0 where there is none). `is_split`
    marks schedules with split backwards, `is_v` those shaped like a V.
    """

    is_single: Any
    is_split: Any
    is_v: Any
    least: Any
    least_first: Any
    least_last: Any
    on_first: Any
    on_second: Any
    on_third: Any
    on_last: Any
    full_first: Any
    full_second: Any
    full_third: Any


def layer_counts_of(subproblem: Subproblem) -> LayerCounts:
    """Fewest layers: the stages between the ends share evenly, the later ones take the remainder.

    Every number grows with `split.between`, so the fewest layers between the ends give the fewest anywhere.
    """
    pp, split, stages = subproblem.pp, subproblem.split, subproblem.stages
    is_v, is_single = IS_V[subproblem.schedule], pp == 1
    end, second, third = pp - 1, np.minimum(1, pp - 1), np.maximum(pp - 2, 0)
    each = split.between // np.maximum(stages - 2, 1)
    start = stages - 1 - (split.between - each * np.maximum(stages - 2, 1))

    def layers(stage: Any) -> Any:
        """Layers of a stage between the ends."""
        return each + ((stage >= start) & (stage < stages - 1))

    def chunks(rank: Any, chunk: Any) -> Any:
        """Layers on a rank's stages between the ends, from its chunk `chunk` on."""
        final = (stages - 2 - rank) // pp
        larger = np.maximum(-(-(start - rank) // pp), chunk)
        return np.maximum(final - chunk + 1, 0) * each + np.maximum(final - larger + 1, 0)

    def folded(rank: Any) -> Any:
        """Layers on the two stages of a V's rank."""
        return layers(rank) + layers(2 * pp - 1 - rank)

    def with_each(end_layers: Any) -> Any:
        """Fewest layers on a stage of a rank with this end stage, and with others if it has chunks."""
        return np.where(chunked, np.minimum(end_layers, each), end_layers)

    chunked = subproblem.vpp > 1
    return LayerCounts(
        is_single=is_single,
        is_split=IS_SPLIT[subproblem.schedule],
        is_v=is_v,
        least=each,
        least_first=np.where(is_v, np.minimum(split.first, split.last), with_each(split.first)),
        least_last=np.where(is_v, each, with_each(split.last)),
        on_first=split.first + np.where(is_v, split.last, np.where(is_single, 0, chunks(0, 1))),
        on_second=np.where(is_v, folded(second), chunks(second, 0)),
        on_third=np.where(is_v, folded(third), chunks(third, 0)),
        on_last=np.where(is_v, folded(end), np.where(is_single, 0, chunks(end, 0) + split.last)),
        full_first=np.where(chunked & ~is_v, layers(stages - pp), 0),
        full_second=np.where(is_v, layers(2 * pp - 2), layers(stages - pp + 1)),
        full_third=np.where(is_v, layers(pp + 1), layers(stages - 2)),
    )


# Totals of grids

WEIGHT_FIELDS = ("tp", "cp", "pp", "dp", "ep", "etp", "axis_order")
"""The fields on which weights and their groups depend."""


@dataclass(frozen=True, slots=True)
class CheapestLayers:
    """Least cost of k layers of a model, as columns.

    `least` is the cost of the cheapest kind of layer, of which the model has `count`; `following` is that of
    the next kind (None where the model has one kind).
    """

    least: Any
    following: Any = None
    count: Any = None

    def of(self, k: Any) -> Any:
        """Least cost of any k layers: at most `count` of them are of the cheapest kind."""
        if self.following is None:
            return k * self.least
        return k * self.following - np.minimum(k, self.count) * (self.following - self.least)

    def scaled(self, factor: Any) -> CheapestLayers:
        """The same cost times a factor."""
        following = None if self.following is None else factor * self.following
        return CheapestLayers(factor * self.least, following, self.count)


def cheapest_layers_of(problem: Problem, costs: Sequence[Any]) -> CheapestLayers:
    """The cheapest layers; `costs` has one column per kind."""
    if len(costs) == 1:
        return CheapestLayers(costs[0])
    columns = np.array(np.broadcast_arrays(*costs))
    counts = np.array([problem.model.pattern.count(k) for k in range(len(costs))])
    order = np.argsort(columns, axis=0, kind="stable")
    least, following = np.take_along_axis(columns, order[:2], axis=0)
    return CheapestLayers(least, following, counts[order[0]])


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Least costs of single layers.

    Seconds: work in all passes, forward, input and weight gradients, selective and full recomputation. Bytes:
    saved activations by recomputation, and what waits for weight gradients. Elements of all weights, of
    trained and of frozen ones.
    """

    work_s: CheapestLayers
    forward_s: CheapestLayers
    input_s: CheapestLayers
    weight_s: CheapestLayers
    selective_s: CheapestLayers
    full_s: CheapestLayers
    saved_bytes: CheapestLayers
    selective_bytes: CheapestLayers
    input_bytes: CheapestLayers
    waiting_bytes: CheapestLayers
    dense_weights: CheapestLayers
    expert_weights: CheapestLayers
    trained_dense: CheapestLayers
    trained_expert: CheapestLayers
    frozen_dense: CheapestLayers
    frozen_expert: CheapestLayers

    @property
    def are_alike(self) -> bool:
        """Whether the model has one kind of layer."""
        return self.work_s.following is None


@dataclass(frozen=True, slots=True)
class Totals:
    """Costs of grids for any stage split, as columns over grids.

    `whole`: sums of the model. `layer`: least costs of layers; `major`: the same of the major kind alone
    (None where there is one kind, or none has more than half of the layers); `most`: most of any layer.
    `embedding` and `head`: the ends of the model.

    `hop_s` is the shortest hop, `mean_hop_s` the mean hop from the first rank to the last. `temporary_bytes`
    are temporaries of a stage without the head, `head_temporary_bytes` of one with it. `recomputed_bytes` are
    tensors that exist at once while a layer is recomputed under the selective recomputation of the row.
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
    recomputed_bytes: Any = 0.0

    def under(self, selective: SelectiveTotals) -> Totals:
        """The same totals under another selective recomputation."""
        own = {"selective_s": selective.whole_s, "selective_bytes": selective.whole_bytes}
        major, major_s, major_bytes = self.major, selective.major_s, selective.major_bytes
        if major is not None and major_s is not None and major_bytes is not None:
            major = replace(major, selective_s=major_s, selective_bytes=major_bytes)
        return replace(
            self,
            whole=replace(self.whole, **own),
            layer=replace(self.layer, selective_s=selective.layer_s, selective_bytes=selective.layer_bytes),
            major=major,
            most=replace(self.most, selective_bytes=selective.most_bytes),
            recomputed_bytes=selective.recomputed_bytes,
        )


@dataclass(frozen=True, slots=True)
class SelectiveTotals:
    """The costs of `Totals` that depend on the set of recomputed modules, as columns over sets and grids."""

    whole_s: Any
    whole_bytes: Any
    layer_s: CheapestLayers
    layer_bytes: CheapestLayers
    major_s: CheapestLayers | None
    major_bytes: CheapestLayers | None
    most_bytes: Any
    recomputed_bytes: Any


@dataclass(frozen=True)
class Grids:
    """Distinct grids with their costs and totals; `table` has one row of each.

    Where sets of modules may be recomputed, `selective` has the costs of each of the `sets` on every grid,
    set by set.
    """

    table: Any
    cost: GridCost
    totals: Totals
    sets: tuple[int, ...] = ()
    selective: SelectiveTotals | None = None

    @cached_property
    def _packed(self) -> tuple[Any, Any]:
        return self._packed_record(self.totals, len(self.table.tp))

    @cached_property
    def _packed_selective(self) -> tuple[Any, Any]:
        return self._packed_record(self.selective, len(self.sets) * len(self.table.tp))

    @staticmethod
    def _packed_record(record: Any, rows: int) -> tuple[Any, Any]:
        """(All real columns of a record in one array, the nested record with indices instead of columns).

        So rows of all columns are taken at once.
        """
        columns: list[Any] = []
        structure = _structure_of(record, columns)
        return np.array([np.broadcast_to(column, (rows,)) for column in columns]), structure

    def costs_of(self, rows: Any) -> GridCostTable:
        """The costs of strategies that have the grids at these indices."""
        return GridCostTable(self.cost, rows)

    def totals_at(self, rows: Any, sets: Any = None) -> Totals:
        """The totals of the grids at these indices, in the shape of the indices; under the selective
        recomputation of these sets of modules (indices of MODULE_SETS, in the same shape)."""
        columns, structure = self._packed
        totals: Totals = _filled(structure, np.take(columns, rows, axis=1), rows)
        if self.selective is None or sets is None:
            return totals
        place = np.searchsorted(self.sets, sets) * len(self.table.tp) + rows
        columns, structure = self._packed_selective
        selective: SelectiveTotals = _filled(structure, np.take(columns, place, axis=1), place)
        return totals.under(selective)


def _structure_of(record: Any, columns: list[Any]) -> Any:
    """A nested record as (type, fields); real columns are appended to `columns` and replaced by their index
    there.
    """
    if record is None or (isinstance(record, np.ndarray) and record.dtype.kind != "f"):
        return record
    if is_dataclass(record):
        return type(record), [_structure_of(getattr(record, f.name), columns) for f in fields(record)]
    columns.append(record)
    return len(columns) - 1


def _filled(structure: Any, columns: Any, rows: Any) -> Any:
    """The record of this structure with these columns; integer columns are taken at `rows`."""
    if isinstance(structure, int):
        return columns[structure]
    if isinstance(structure, tuple):
        return structure[0](*[_filled(part, columns, rows) for part in structure[1]])
    return None if structure is None else structure[rows]


def grids_of(problem: Problem, table: Any, sets: Sequence[int] = ()) -> Grids:
    """Costs and totals of a table of distinct grids, and those of each of these sets of recomputed modules
    (indices of MODULE_SETS)."""
    grid = grid_cost(problem, table)
    totals = totals_of(problem, table, grid)
    if not any(sets):
        return Grids(table, grid, totals)
    known = tuple(sorted({0, *sets}))
    return Grids(table, grid, totals, known, _selective_totals(problem, table, grid, known))


def _selective_totals(problem: Problem, table: Any, grid: GridCost, sets: Sequence[int]) -> SelectiveTotals:
    """The costs of each of these sets of modules on every grid, set by set."""
    grids = np.arange(len(table.tp))
    of_grid = np.tile(grids, len(sets))
    each = table.take(of_grid).replaced(recompute_modules=np.repeat(sets, len(grids)))
    columns = SelectiveRows(problem, each, grid, of_grid).columns
    pattern, kinds = problem.model.pattern, range(len(grid.kinds))
    counts = np.array([*(pattern.count(k) for k in kinds), 1, 1], dtype=np.float64)
    whole = np.tensordot(columns, counts, axes=([1], [0]))
    layers = [[columns[field, k] for k in kinds] for field in (SECONDS, SAVED)]
    major = major_kind(problem)
    majors = [None if major is None else cheapest_layers_of(problem, [one[major]]) for one in layers]
    most = columns[:, : len(grid.kinds)].max(axis=1)
    return SelectiveTotals(
        whole_s=whole[SECONDS],
        whole_bytes=whole[SAVED],
        layer_s=cheapest_layers_of(problem, layers[0]),
        layer_bytes=cheapest_layers_of(problem, layers[1]),
        major_s=majors[0],
        major_bytes=majors[1],
        most_bytes=most[SAVED],
        recomputed_bytes=most[RECOMPUTED],
    )


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
        communicators=communicators_of(table),
    )


def major_kind(problem: Problem) -> int | None:
    """The kind of more than half of all layers; None where there is none, or only one kind."""
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
        waiting_bytes=cost(lambda kind: kind.waiting_bytes),
        dense_weights=cost(lambda kind: kind.dense_weights),
        expert_weights=cost(lambda kind: kind.expert_weights),
        trained_dense=cost(lambda kind: kind.trained_dense),
        trained_expert=cost(lambda kind: kind.trained_expert),
        frozen_dense=cost(lambda kind: kind.dense_weights - kind.trained_dense),
        frozen_expert=cost(lambda kind: kind.expert_weights - kind.trained_expert),
    )


# Traffic of sharding


@dataclass(frozen=True, slots=True)
class Traffic:
    """Exposed seconds per micro-batch that sharding adds: all-gathers of parameters, reduce-scatters of
    gradients.

    `gathers_s` (both passes) and `reduce_scatters_s` are of the whole model. `layer_s` is both together for
    the layer with least, `embedding_s` and `head_s` for the ends.
    """

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
    """Exposed all-gathers and reduce-scatters of some grids by degree; shape (degrees, 4, grids).

    The second axis is the whole model, the layer with least, embedding, head.
    """

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

    Before overlap it does not depend on the micro-batch size or on other fields that decide computation only.
    """
    table, cost = grids.table.take(used), taken(grids.cost, used)
    rows, of_row = distinct_rows([getattr(table, name) for name in WEIGHT_FIELDS])
    each, degree = np.tile(rows, len(degrees)), np.repeat(degrees, len(rows))
    few = table.take(each)
    own = np.where(few.dp * few.cp % degree == 0, degree, 1)
    few, few_cost = few.replaced(param_shard=own, grad_shard=own, optim_shard=own), taken(cost, each)
    dense, expert = shard_degrees(problem, few, few_cost)
    blocks = ShardedBlocks.of(few_cost.blocks)
    moved = [
        part.reshape(len(part), len(degrees), len(rows))[:, :, of_row]
        for part in blocks.traffic_s(problem, few, few_cost.fabric, dense, expert)
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
    """Traffic of each row, which has the grid `of_grid[i]`; it depends on two degrees only."""
    used, place = np.unique(of_grid, return_inverse=True)
    degrees = np.unique(np.concatenate([param_shard, grad_shard]))
    return traffic_table(problem, grids, used, degrees).at(param_shard, grad_shard, place)
