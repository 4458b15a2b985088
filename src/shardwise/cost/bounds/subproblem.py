"""Blocks of strategies: what shares a grid and a schedule while stage splits, recomputed layers and sharding
degrees are open or known in part; and how its layers lie on stages and ranks at least.

What a grid costs wherever its layers lie: sums over the model, the least and the most of any layer, the
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost.estimate import GridCostTable, taken
from shardwise.cost.layers import GridCost, grid_cost
from shardwise.cost.memory import communicators
from shardwise.cost.problem import Problem, distinct_rows
from shardwise.cost.sharding import ShardedBlocks, shard_degrees
from shardwise.cost.stages import IS_SPLIT, Sums, block_columns, whole_sums
from shardwise.strategy import IS_V, largest_stage


@dataclass(frozen=True, slots=True)
class Split:
    """Stage splits: the fewest layers on the first stage, on the last, and on all others together; the most
    on any one. Columns; a known split has its own numbers."""

    first: Any
    last: Any
    between: Any
    largest: Any


def known_split(layers: int, stages: Any, first: Any, last: Any) -> Split:
    """Splits whose ends are known."""
    between = np.where(stages > 2, layers - first - last, 0)
    return Split(first, last, between, largest_stage(layers, stages, first, last))


@dataclass(frozen=True, slots=True)
class Subproblem:
    """Blocks as columns that broadcast together.

    Where recomputation is full, `recompute_layers` is the least number and `recompute_most` the largest. Of
    the sharding degrees, which are the largest of the block, memory falls with each, and time with
    `optim_shard`; what `param_shard` and `grad_shard` cost in time is the `Traffic` beside the block. Where
    sharding is open (`is_open`), whole copies of sharded parameters count nothing: it may be that none are.
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
    """The block with any sharding over so many ranks, at the least bytes."""
    return replace(subproblem, param_shard=ranks, grad_shard=ranks, optim_shard=ranks, is_open=True)


def subproblem_of(problem: Problem, table: Any, split: Split, recompute_most: Any = None) -> Subproblem:
    """The block of every row of a table, apart from its split; the row's `recompute_layers` are the least, or
    (without `recompute_most`) the only ones."""
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
    """Where the layers of a block lie at least.

    `least` layers on each stage between the ends. On the first rank, the second, the last but one and the
    last: all of the rank's layers (`on_*`), and those of its fullest stage between (`full_*`); 0 where there
    is none. `is_split` marks schedules that split backwards, `is_v` those shaped like a V.
    """

    is_single: Any
    is_split: Any
    is_v: Any
    least: Any
    on_first: Any
    on_second: Any
    on_third: Any
    on_last: Any
    full_first: Any
    full_second: Any
    full_third: Any
    full_last: Any


def layer_counts_of(subproblem: Subproblem) -> LayerCounts:
    """How the layers lie: the stages between share evenly, the later ones take the remainder.

    Every number grows with `split.between`, so fewest layers between give fewest anywhere.
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

    chunked = subproblem.vpp > 1
    return LayerCounts(
        is_single=is_single,
        is_split=IS_SPLIT[subproblem.schedule],
        is_v=is_v,
        least=each,
        on_first=split.first + np.where(is_v, split.last, np.where(is_single, 0, chunks(0, 1))),
        on_second=np.where(is_v, folded(second), chunks(second, 0)),
        on_third=np.where(is_v, folded(third), chunks(third, 0)),
        on_last=np.where(is_v, folded(end), np.where(is_single, 0, chunks(end, 0) + split.last)),
        full_first=np.where(chunked & ~is_v, layers(stages - pp), 0),
        full_second=np.where(is_v, layers(2 * pp - 2), layers(stages - pp + 1)),
        full_third=np.where(is_v, layers(pp + 1), layers(stages - 2)),
        full_last=np.where(chunked, np.where(is_v, layers(pp), layers(stages - pp - 1)), 0),
    )


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
