"""Branching rules and the depth-first part of the search, from root nodes to evaluated strategies.

    micro-batches -> recomputation and offload -> family of schedules -> parameter and gradient sharding
          -> schedule -> stage split -> recomputed layers -> leaves (see `leaves.Leaves`)

`CoarseBranching` has the upper levels, `FineBranching` the lower ones, `SubtreeSearch` descends through them.
On every level, nodes that cannot fit are rejected, nodes that cannot improve on the incumbents are pruned,
and the others are branched. `Ranges` halves ranges of numbers of recomputed layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Grids,
    LayerCounts,
    Problem,
    Split,
    Subproblem,
    Totals,
    distinct_rows,
    grid_lower_bound_s,
    grid_work_lower_bound_s,
    grids_of,
    known_split,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    subproblem_of,
    traffic_table,
)
from shardwise.search.bnb.incumbent import Goal
from shardwise.search.bnb.leaves import Leaves
from shardwise.search.bnb.ledger import OutcomeCounts
from shardwise.search.bnb.nodes import (
    BLOCK_FIELDS,
    FEW_PAIRS,
    NO_SPLIT,
    NO_TRAFFIC_ROWS,
    PAIRS_PER_BATCH,
    SPLIT_FIELDS,
    SearchNodes,
    alike_nodes,
    empty_like,
    join_splits,
    legal_pairs,
    map_distinct,
    slices,
    take_splits,
)
from shardwise.search.bnb.prune import BoundTightening, Pruner
from shardwise.search.space import FAMILIES, FULL, Space, Variants, expanded
from shardwise.search.step_times import microbatches_of
from shardwise.strategy import MEMORY, Column, StrategyTable, most_stages


@dataclass(frozen=True)
class Branching:
    """The common part of all branching rules below some grids; `weights` has the number of grids that each
    stands for."""

    problem: Problem
    space: Space
    goal: Goal
    grids: Grids
    pruner: Pruner
    weights: NDArray[np.int64]

    @cached_property
    def tightening(self) -> BoundTightening:
        """Bound tightening for nodes of these grids."""
        return BoundTightening(self.problem, self.space, self.grids, self.goal, self.pruner)

    def block(self, nodes: SearchNodes, split: Split) -> Subproblem:
        """The subproblems of nodes, with these splits."""
        return subproblem_of(self.problem, nodes.table, split)

    def variants(self, pp: int) -> Variants:
        """Schedules of a pipeline of `pp` ranks for which the model has enough layers."""
        variants = self.space.variants(pp)
        return variants.take(pp * variants.vpp <= most_stages(self.space.layers, variants.schedule))

    def candidates_with(self, nodes: SearchNodes, pp: int, variants: Variants) -> NDArray[np.int64]:
        """Candidates below each node (down) with each schedule of `variants` (across); 0 where it is
        illegal."""
        table, m = nodes.table, microbatches_of(self.problem, nodes.table)
        legal = map_distinct(self.space.count_legal, table.pp, m, table.recompute)
        return self.candidates_by_variant(nodes, pp, variants, legal)

    def candidates_by_variant(
        self, nodes: SearchNodes, pp: int, variants: Variants, legal: Any
    ) -> NDArray[np.int64]:
        """The same, where each node has `legal` combinations of schedule, split and recomputed layers below
        it."""
        space, m = self.space, microbatches_of(self.problem, nodes.table)
        stages = (pp * variants.vpp).tolist()
        below = np.array([[space.count_splits(n, kind) for n in stages] for kind in range(FULL + 1)])
        per_split = nodes.candidates // np.maximum(legal, 1)
        return np.where(
            legal_pairs(space, pp, m, variants), below[nodes.table.recompute] * per_split[:, None], 0
        )

    def as_column(self, nodes: SearchNodes, split: Split, **changes: Any) -> Subproblem:
        """The subproblems of nodes as columns (down), to be combined with options (across)."""
        block = self.block(nodes, split)
        down = {name: getattr(block, name)[:, None] for name in BLOCK_FIELDS}
        return replace(block, split=split, **(down | changes))

    def improving_options(
        self, nodes: SearchNodes, time_s: Any, device_bytes: Any, candidates: NDArray[np.int64], level: str
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Node and option of the pairs that may improve; the others count as pruned. Pairs without candidates
        are left out."""
        keep = self.pruner.may_improve(level, time_s, device_bytes)
        self.pruner.prune(level, nodes.of_grid, np.where(keep, 0, candidates).sum(axis=1))
        row, option = np.nonzero(keep & (candidates > 0))
        return row, option

    def fewest_recompute_layers(self, stages: int, recompute: int) -> int:
        """Recomputed layers of a stage in a pipeline of `stages`, at least, whatever the split."""
        space = self.space
        if space.is_core and recompute == FULL:
            return int(space.split_range(stages).largest)
        return int(space.recompute_layers(recompute, space.layers).min(initial=space.layers))

    def split_of(self, table: StrategyTable) -> Split:
        """The splits of a table in which they are known."""
        return known_split(
            self.space.layers, table.pp * table.vpp, table.first_stage_layers, table.last_stage_layers
        )


# Upper levels

FEW_NODES = 2048
"""Nodes of one pp up to which several families of schedules are bounded in one batch."""


class CoarseBranching(Branching):
    """Branching from grids down to the sharding of parameters and gradients."""

    def root_nodes(self) -> SearchNodes:
        """The grids as nodes, with the candidates whose schedule is legal."""
        space, table = self.space, self.grids.table
        pp, m = table.pp, microbatches_of(self.problem, table)
        legal = map_distinct(
            lambda ranks, microbatches: sum(
                space.count_legal(ranks, microbatches, int(kind)) for kind in space.recomputes
            ),
            pp,
            m,
        )
        below = len(space.offloads) * space.count_shards(table.dp * table.cp) * self.weights
        none = np.zeros(len(table))
        return SearchNodes(table, np.arange(len(table)), none, none, legal * below)

    def bound_micro_batches(self, nodes: SearchNodes) -> SearchNodes:
        """Bounds grids with their micro-batch sizes by their whole work."""
        block = self.block(nodes, NO_SPLIT)
        return self.pruner.pruned(
            nodes, "micro_batch", grid_work_lower_bound_s(self.problem, block, self.grids.totals)
        )

    def branch_recompute(self, nodes: SearchNodes) -> SearchNodes:
        """Branches on recomputation and offload; states count as sharded as far as possible."""
        space = self.space
        kinds = space.recompute_options
        kind, offloads = np.meshgrid(np.arange(len(space.recomputes)), space.offloads, indexing="ij")
        options = {name: column[kind.ravel()] for name, column in kinds.items()}
        options["offload"] = offloads.ravel()
        parent, table = expanded(nodes.table, [0 * nodes.table.tp], lambda _: options)
        m = microbatches_of(self.problem, table)
        legal = map_distinct(space.count_legal, table.pp, m, table.recompute)
        candidates = legal * (space.count_shards(table.dp * table.cp) * self.weights[nodes.of_grid[parent]])
        least = map_distinct(self._fewest_layers, table.pp, table.recompute)
        common = map_distinct(self._common_states, table.dp * table.cp)
        table = table.replaced(recompute_layers=least, optim_shard=common)
        nodes = nodes.children(parent, table, candidates).take(candidates > 0)
        block = replace(self.block(nodes, NO_SPLIT), recompute_most=self.space.layers)
        totals = self.grids.totals_at(nodes.of_grid, nodes.table.recompute_modules)
        time_s = grid_lower_bound_s(self.problem, block, totals, nodes.traffic)
        nodes = self.pruner.pruned(nodes, "kept", np.maximum(time_s, nodes.lower_bound_s))
        return self.tightening.recomputes_within_capacity(nodes)

    def _fewest_layers(self, pp: int, recompute: int) -> int:
        """Recomputed layers of a stage, at least, under any schedule of a pipeline of `pp` ranks."""
        stages = np.unique(pp * self.space.variants(pp).vpp)
        return min((self.fewest_recompute_layers(int(n), recompute) for n in stages), default=0)

    def _common_states(self, ranks: int) -> int:
        """The least sharding degree that all degrees of the optimizer states divide."""
        return int(np.lcm.reduce(self.space.shards(ranks)["optim_shard"], initial=1))

    def branch_family(self, nodes: SearchNodes) -> SearchNodes:
        """Branches on families of schedules: those within capacity, with everything sharded as far as
        possible and no traffic for it."""
        parts = [empty_like(nodes)]
        for pp in np.unique(nodes.table.pp).tolist():
            same = nodes.take(np.flatnonzero(nodes.table.pp == pp))
            below = [empty_like(nodes)]
            for variants in self.variants(pp).families.values():
                candidates = self.candidates_with(same, pp, variants).sum(axis=1)
                few, one = (
                    same.replaced(candidates=candidates).take(candidates > 0),
                    variants.representative(pp),
                )
                below.append(few.replaced(table=few.table.replaced(
                    schedule=np.broadcast_to(one.schedule, (len(few),)),
                    vpp=np.broadcast_to(one.vpp, (len(few),)),
                )))  # fmt: skip
            parts.append(self._families_within_capacity(SearchNodes.joined(below), "family", pp))
        return SearchNodes.joined(parts)

    def _families_within_capacity(self, nodes: SearchNodes, level: str, pp: int) -> SearchNodes:
        """The nodes of one `pp`, each with a family of schedules, that fit, may improve and have capacity for
        all layers."""
        families, parts = self.variants(pp).families, [empty_like(nodes)]
        if len(nodes) < FEW_NODES:
            return self.tightening.families_within_capacity(nodes, level, pp, families)
        for family in families:
            for same in alike_nodes(nodes, FAMILIES[nodes.table.schedule] == family, 1):
                few = nodes.take(same)
                parts.append(self.tightening.families_within_capacity(few, level, pp, families))
        return SearchNodes.joined(parts)

    def branch_sharding(self, nodes: SearchNodes) -> SearchNodes:
        """Branches on the sharding degrees of parameters and gradients."""
        parts = [empty_like(nodes).replaced(traffic=NO_TRAFFIC_ROWS)]
        each, of_each = np.unique(nodes.table.dp * nodes.table.cp, return_inverse=True)
        for index, ranks in enumerate(each.tolist()):
            options = self.space.param_grad_shards(ranks)
            same = np.flatnonzero(of_each == index)
            for part in slices(len(same), max(PAIRS_PER_BATCH // max(len(options["states"]), 1), 1)):
                parts.append(self._sharded_alike(nodes.take(same[part]), ranks, options))
        sharded = SearchNodes.joined(parts)
        parts = [empty_like(sharded)]
        for pp in np.unique(sharded.table.pp).tolist():
            parts.append(self._families_within_capacity(sharded.take(sharded.table.pp == pp), "sharded", pp))
        return SearchNodes.joined(parts)

    def _sharded_alike(self, nodes: SearchNodes, ranks: int, options: Mapping[str, Column]) -> SearchNodes:
        """The same for nodes of one number of `ranks`: every node (down) with every option (across)."""
        problem, grids = self.problem, self.grids
        used, place = np.unique(nodes.of_grid, return_inverse=True)
        param, grad, optim = (options[name] for name in ("param_shard", "grad_shard", "optim_shard"))
        traffic = traffic_table(problem, grids, used, np.unique([param, grad]))
        block = self.as_column(nodes, NO_SPLIT, recompute_most=self.space.layers)
        block = replace(block, optim_shard=optim[None])
        totals = grids.totals_at(nodes.of_grid[:, None], nodes.table.recompute_modules[:, None])
        pair_traffic = traffic.at(param[None], grad[None], place[:, None])
        time_s = np.maximum(
            grid_lower_bound_s(problem, block, totals, pair_traffic), nodes.lower_bound_s[:, None]
        )
        per_state = nodes.candidates // int(self.space.count_shards(np.array([ranks]))[0])
        candidates = per_state[:, None] * options["states"][None]
        row, option = self.improving_options(
            nodes, time_s, nodes.device_bytes[:, None], candidates, "sharded"
        )
        table = nodes.table.take(row).replaced(
            param_shard=param[option], grad_shard=grad[option], optim_shard=optim[option]
        )
        below = nodes.children(row, table, candidates[row, option])
        child_traffic = traffic.at(param[option], grad[option], place[row])
        return below.replaced(lower_bound_s=time_s[row, option], traffic=child_traffic)


# Numbers of recomputed layers

Ints = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of numbers of recomputed layers. Range i belongs to node `row[i]` and has `numbers[start[i]]` to
    `numbers[stop[i] - 1]`, ascending; none is empty."""

    numbers: Column
    row: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.row)

    @property
    def least(self) -> Column:
        """The smallest number of each range."""
        return self.numbers[self.start]

    @property
    def most(self) -> Column:
        """The largest number of each range."""
        return self.numbers[self.stop - 1]

    @property
    def width(self) -> Ints:
        """How many numbers each range has."""
        return self.stop - self.start

    def take(self, ranges: Any) -> Ranges:
        """The selected ranges."""
        return replace(self, row=self.row[ranges], start=self.start[ranges], stop=self.stop[ranges])

    def halved(self) -> Ranges:
        """Both halves of each range, one after the other; a single number stays."""
        count = np.minimum(self.width, 2)
        whole = np.repeat(np.arange(len(self)), count)
        is_second = np.arange(len(whole)) != np.repeat(np.cumsum(count) - count, count)
        middle = ((self.start + self.stop + 1) // 2)[whole]
        start, stop = self.start[whole], self.stop[whole]
        return replace(
            self,
            row=self.row[whole],
            start=np.where(is_second, middle, start),
            stop=np.where(is_second, stop, middle),
        )


def ranges_from(
    least: Column, largest: Column, choices_of: Callable[[int], Sequence[int] | Column]
) -> tuple[Ranges, Ints]:
    """For every row the ascending choices for its `largest` from `least` on (at least one), and the number of
    choices below `least`."""
    each, of_row = np.unique(largest, return_inverse=True)
    choices = [np.asarray(choices_of(most), dtype=np.int64) for most in each.tolist()]
    numbers, begins = np.concatenate(choices), np.cumsum([0, *map(len, choices)])
    # One ascending key for all choices, so that one search serves all rows.
    step = int(each.max()) + 1
    keys = np.repeat(np.arange(len(each)), np.diff(begins)) * step + numbers
    start = np.searchsorted(keys, of_row * step + least)
    ranges = Ranges(numbers, np.arange(len(least)), start, begins[of_row + 1])
    return ranges, start - begins[of_row]


# Lower levels

EVERY = slice(None)
"""All options of a node."""


class FineBranching(Branching):
    """Branching from known sharding down to nodes in which only the sharding of optimizer states is open."""

    def branch_schedule(self, nodes: SearchNodes) -> SearchNodes:
        """Branches on the schedule and its number of chunks (vpp)."""
        parts = [empty_like(nodes)]
        for pp in np.unique(nodes.table.pp).tolist():
            variants, is_deep = self.variants(pp), nodes.table.pp == pp
            if np.count_nonzero(is_deep) * len(variants) < FEW_PAIRS:
                below = [self._scheduled_alike(nodes.take(is_deep), pp, variants)]
            else:
                below = [
                    self._scheduled_alike(nodes.take(same[part]), pp, few)
                    for family, few in variants.families.items()
                    for same in alike_nodes(
                        nodes, is_deep & (FAMILIES[nodes.table.schedule] == family), len(few)
                    )
                    for part in slices(len(same), max(PAIRS_PER_BATCH // len(few), 1))
                ]
            if below:
                children, split = (
                    SearchNodes.joined([some for some, _ in below]),
                    join_splits([of for _, of in below]),
                )
                for part in slices(len(children), PAIRS_PER_BATCH // pp):
                    tight = self.tightening.tightened(
                        children.take(part), take_splits(split, part), "schedule", pp
                    )
                    parts.append(self.tightening.schedules_within_capacity(*tight, pp))
        return SearchNodes.joined(parts)

    def _scheduled_alike(self, nodes: SearchNodes, pp: int, variants: Variants) -> tuple[SearchNodes, Split]:
        """Every node (down) with every schedule of its family (across), and the ranges of their splits."""
        family, m = FAMILIES[nodes.table.schedule], microbatches_of(self.problem, nodes.table)
        legal = map_distinct(self.space.count_legal, nodes.table.pp, m, nodes.table.recompute, family)
        candidates = self.candidates_by_variant(nodes, pp, variants, legal)
        candidates[family[:, None] != FAMILIES[variants.schedule]] = 0
        space, kind = self.space, nodes.table.recompute
        stages = (pp * variants.vpp).tolist()
        ranges = [space.split_range(n) for n in stages]
        split = Split(*(np.array([getattr(r, name) for r in ranges])[None] for name in SPLIT_FIELDS))
        fewest = np.array(
            [[self.fewest_recompute_layers(n, kind) for n in stages] for kind in range(FULL + 1)]
        )
        block = self.as_column(nodes, split, recompute_layers=fewest[kind], recompute_most=split.largest)
        block = replace(block, schedule=variants.schedule[None], vpp=variants.vpp[None])
        row, variant, time_s = self._improving_pairs(nodes, block, candidates, "schedule")
        table = nodes.table.take(row).replaced(
            schedule=variants.schedule[variant], vpp=variants.vpp[variant],
            recompute_layers=block.recompute_layers[row, variant],
        )  # fmt: skip
        children = nodes.children(row, table, candidates[row, variant]).replaced(lower_bound_s=time_s)
        split = Split(
            *(np.broadcast_to(getattr(split, name), candidates.shape)[row, variant] for name in SPLIT_FIELDS)
        )
        return children, split

    def _improving_pairs(
        self, nodes: SearchNodes, block: Subproblem, candidates: NDArray[np.int64], level: str
    ) -> tuple[Any, Any, Any]:
        """Node, option and bound of the pairs that may improve; the others count as pruned. Pairs without
        candidates are left out."""
        problem, layer_counts = self.problem, layer_counts_of(block)
        totals = self.grids.totals_at(nodes.of_grid[:, None], nodes.table.recompute_modules[:, None])
        traffic = nodes.traffic.taken(np.arange(len(nodes))[:, None])
        time_s = np.maximum(
            lower_bound_s(problem, block, layer_counts, totals, traffic), nodes.lower_bound_s[:, None]
        )
        device_bytes = nodes.device_bytes[:, None]
        if self.goal.weighs_memory:
            device_bytes = np.maximum(device_bytes, self._fully_recomputed_bytes(block, layer_counts, totals))
        row, option = self.improving_options(nodes, time_s, device_bytes, candidates, level)
        return row, option, time_s[row, option]

    def schedules_of(self, nodes: SearchNodes) -> NDArray[np.int64]:
        """How many schedules each node is branched on, at most."""
        return map_distinct(lambda pp: len(self.variants(pp)), nodes.table.pp)

    def splits_of(self, nodes: SearchNodes) -> NDArray[np.int64]:
        """How many splits each node is branched on."""
        return map_distinct(lambda n: len(self._end_layers(n)[0]), nodes.table.pp * nodes.table.vpp)

    def recompute_layers_of(self, nodes: SearchNodes) -> NDArray[np.int64]:
        """How many numbers of recomputed layers each node is branched on, at most."""
        largest = np.asarray(self.split_of(nodes.table).largest)
        return np.where(nodes.table.recompute == FULL, largest, 1).astype(np.int64)

    def branch_split(self, nodes: SearchNodes, which: slice = EVERY) -> SearchNodes:
        """Branches on the layers of the first and last stage: on all splits, or on some of the splits of one
        node."""
        table, parts, few = nodes.table, [empty_like(nodes)], np.zeros(len(nodes), dtype=bool)
        first, of_each = distinct_rows([table.pp, table.vpp, table.schedule])
        for index, row in enumerate(first.tolist()):
            is_alike, count = of_each == index, len(self._end_layers(table.pp[row] * table.vpp[row])[0])
            if np.count_nonzero(is_alike) * count < FEW_PAIRS:
                few |= is_alike
                continue
            for same in alike_nodes(nodes, is_alike, count):
                for part in slices(len(same), max(PAIRS_PER_BATCH // max(count, 1), 1)):
                    alike = nodes.take(same[part])
                    parts += [self._split_alike(alike, some) for some in self._parts_of_splits(count, which)]
        parts.extend(self._split_each(nodes.take(part)) for part in self._parts_of_few(nodes, few))
        below = SearchNodes.joined(parts)
        split = self.split_of(below.table)
        return SearchNodes.joined([
            self.tightening.tightened(below.take(part), take_splits(split, part), "split")[0]
            for part in slices(len(below), PAIRS_PER_BATCH)
        ])  # fmt: skip

    def _end_layers(self, stages: Any) -> tuple[Column, Column]:
        """Layers of the first and of the last stage of each split."""
        splits = self.space.splits(int(stages))
        return splits["first_stage_layers"], splits["last_stage_layers"]

    def _parts_of_few(self, nodes: SearchNodes, mask: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
        """The indices under `mask`, in batches of about PAIRS_PER_BATCH splits."""
        index = np.flatnonzero(mask)
        if len(index):
            stages = (nodes.table.pp * nodes.table.vpp)[index]
            below = np.cumsum(map_distinct(lambda n: len(self._end_layers(n)[0]), stages))
            yield from np.split(index, np.flatnonzero(np.diff(below // PAIRS_PER_BATCH)) + 1)

    def _split_each(self, nodes: SearchNodes) -> SearchNodes:
        """The same for nodes of several schedules with few splits: the splits of every node, one after the
        other."""
        space, stages = self.space, nodes.table.pp * nodes.table.vpp
        parent, table = expanded(nodes.table, [stages], space.splits)
        split = self.split_of(table)
        numbers = map_distinct(
            lambda kind, most: len(space.recompute_layers(kind, most)), table.recompute, split.largest
        )
        below = map_distinct(space.count_splits, stages, nodes.table.recompute)
        candidates = numbers * (nodes.candidates // np.maximum(below, 1))[parent]
        layers = np.minimum(table.recompute_layers, split.largest)
        each = nodes.children(parent, table.replaced(recompute_layers=layers), candidates)
        each, split = each.take(candidates > 0), take_splits(split, candidates > 0)
        block, totals = (
            self.block(each, split),
            self.grids.totals_at(each.of_grid, each.table.recompute_modules),
        )
        block, layer_counts = replace(block, recompute_most=split.largest), layer_counts_of(block)
        time_s = np.maximum(
            lower_bound_s(self.problem, block, layer_counts, totals, each.traffic), each.lower_bound_s
        )
        device_bytes = (
            self._fully_recomputed_bytes(block, layer_counts, totals) if self.goal.weighs_memory else None
        )
        return self.pruner.pruned(each, "split", time_s, device_bytes)

    def _fully_recomputed_bytes(self, block: Subproblem, layer_counts: LayerCounts, totals: Totals) -> Any:
        """Lower bound of bytes, with as many recomputed layers as possible."""
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, block.split.largest, 0))
        return lower_bound_bytes(self.problem, most, layer_counts, totals)

    def _parts_of_splits(self, count: int, which: slice) -> Iterator[slice]:
        """The splits `which` of `count`, in slices of at most PAIRS_PER_BATCH."""
        first, last, _ = which.indices(count)
        for start in range(first, last, PAIRS_PER_BATCH):
            yield slice(start, min(start + PAIRS_PER_BATCH, last))

    def _split_alike(self, nodes: SearchNodes, which: slice) -> SearchNodes:
        """The same for nodes of one schedule: every node (down) with the splits `which` (across)."""
        space, table = self.space, nodes.table
        stages = int(table.pp[0] * table.vpp[0])
        ends = {name: column[which] for name, column in space.splits(stages).items()}
        split = known_split(space.layers, stages, ends["first_stage_layers"], ends["last_stage_layers"])
        split = Split(*(np.asarray(getattr(split, name))[None] for name in SPLIT_FIELDS))
        numbers = np.array(
            [
                [len(space.recompute_layers(kind, n)) for n in split.largest[0].tolist()]
                for kind in range(FULL + 1)
            ]
        ).reshape(FULL + 1, -1)
        below = map_distinct(lambda kind: space.count_splits(stages, kind), table.recompute)
        candidates = numbers[table.recompute] * (nodes.candidates // np.maximum(below, 1))[:, None]
        layers = np.minimum(table.recompute_layers[:, None], split.largest)
        block = self.as_column(nodes, split, recompute_layers=layers, recompute_most=split.largest)
        block = replace(
            block, schedule=table.schedule[:1, None], vpp=table.vpp[:1, None], pp=table.pp[:1, None]
        )
        row, option, time_s = self._improving_pairs(nodes, block, candidates, "split")
        table = table.take(row).replaced(
            first_stage_layers=ends["first_stage_layers"][option],
            last_stage_layers=ends["last_stage_layers"][option],
            recompute_layers=layers[row, option],
        )
        return nodes.children(row, table, candidates[row, option]).replaced(lower_bound_s=time_s)

    def branch_recompute_layers(self, nodes: SearchNodes) -> SearchNodes:
        """Branches on the number of recomputed layers; numbers too small to fit are rejected."""
        is_full = nodes.table.recompute == FULL
        plain, full = nodes.take(~is_full), nodes.take(is_full)
        if not len(full):
            return plain
        ranges, fewer = ranges_from(
            full.table.recompute_layers,
            self.split_of(full.table).largest,
            lambda most: self.space.recompute_layers(FULL, most),
        )
        full = full.replaced(candidates=full.candidates // (fewer + ranges.width))
        self.pruner.add(MEMORY, full.of_grid, full.candidates * fewer)
        return SearchNodes.joined([plain, self._of_ranges(full, ranges)])

    def _of_ranges(self, nodes: SearchNodes, ranges: Ranges) -> SearchNodes:
        """Nodes with each number of recomputed layers in their ranges; each number has a node's candidates.
        Ranges are bounded, and those that may improve are halved until each is one number."""
        parts, places = [empty_like(nodes)], [ranges.row[:0]]
        while len(ranges):
            ranges = ranges.halved()
            below, keep = self._bounded(nodes, ranges)
            ranges = ranges.take(keep)
            is_one = ranges.width == 1
            parts.append(below.take(is_one))
            places.append(ranges.row[is_one] * (self.space.layers + 1) + ranges.least[is_one])
            ranges = ranges.take(~is_one)
        return SearchNodes.joined(parts).take(np.argsort(np.concatenate(places), kind="stable"))

    def _bounded(self, nodes: SearchNodes, ranges: Ranges) -> tuple[SearchNodes, NDArray[np.bool_]]:
        """The nodes with their ranges that may improve, and the mask of these ranges. The least time is at
        the fewest recomputed layers, the least memory at the most."""
        problem, row = self.problem, ranges.row
        table = nodes.table.take(row).replaced(recompute_layers=ranges.least)
        below = nodes.children(row, table, nodes.candidates[row] * ranges.width)
        block = replace(self.block(below, self.split_of(table)), recompute_most=ranges.most)
        layer_counts, totals = (
            layer_counts_of(block),
            self.grids.totals_at(below.of_grid, below.table.recompute_modules),
        )
        time_s = np.maximum(
            lower_bound_s(problem, block, layer_counts, totals, below.traffic), below.lower_bound_s
        )
        if self.goal.weighs_memory:
            most = replace(block, recompute_layers=ranges.most)
            device_bytes = np.maximum(
                lower_bound_bytes(problem, most, layer_counts, totals), below.device_bytes
            )
            below = below.replaced(device_bytes=device_bytes)
        keep = self.pruner.may_improve("layers", time_s, below.device_bytes)
        return self.pruner.pruned_to(below.replaced(lower_bound_s=time_s), "layers", keep), keep


# Depth-first search

FIRST_BATCHES = (512, 2048, 4096, 1 << 14, 2048, 1 << 14)
"""Nodes of each level that are branched first, before there is an incumbent."""

LARGE_BATCH, BATCH_GROWTH = 1 << 14, 8
"""Nodes that are branched first once there is an incumbent, and the factor from each batch to the next."""

MOST_CHILDREN = 1 << 20
"""Most children of a batch, before any is pruned: 250 bytes each, and twice that while they are joined. It
bounds memory, since every level has one batch of children at a time."""


@dataclass(frozen=True, slots=True)
class BranchingLevel:
    """A level of the tree. `branch` gives the children of nodes, and `count` how many each has, at most;
    None: few. Where `divides`, `branch` also takes a slice of the options of each node."""

    name: str
    branch: Callable[..., SearchNodes]
    count: Callable[[SearchNodes], NDArray[np.int64]] | None = None
    divides: bool = False

    def children(self, nodes: SearchNodes) -> Iterator[SearchNodes]:
        """The children of nodes; of one node with more than MOST_CHILDREN, some at a time."""
        if self.divides and self.count is not None and len(nodes) == 1:
            for part in slices(int(self.count(nodes)[0]), MOST_CHILDREN):
                yield self.branch(nodes, part)
        else:
            yield self.branch(nodes)


class SubtreeSearch:
    """Searches the subtrees below some grids (with their micro-batch sizes).

    `weights` has the number of grids that each row stands for. Incumbents go to `goal`; after `run`,
    `outcomes` has the outcomes of all candidates. `without` names bounds that are switched off. `check` is
    called regularly and may raise.
    """

    def __init__(
        self,
        problem: Problem,
        space: Space,
        goal: Goal,
        table: StrategyTable,
        weights: NDArray[np.int64],
        *,
        exhaustive: bool = False,
        without: frozenset[str] = frozenset(),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._problem, self._space, self._goal, self._check = problem, space, goal, check
        self._table, self._weights = table, weights
        self.outcomes = OutcomeCounts.of(len(table))
        self._pruner = Pruner(problem, goal, self.outcomes, is_exhaustive=exhaustive, without=without)

    def run(self) -> None:
        """Searches; afterwards `outcomes` counts every candidate below the grids."""
        if len(self._table):
            self._descend(self._coarse.bound_micro_batches(self._coarse.root_nodes()), 0)

    @cached_property
    def _grids(self) -> Grids:
        sets = self._space.recompute_options["recompute_modules"].tolist()
        return grids_of(self._problem, self._table, sets)

    @cached_property
    def _leaves(self) -> Leaves:
        parts = (self._problem, self._space, self._goal, self._grids, self._pruner, self._weights)
        return Leaves(*parts, self._check)

    @cached_property
    def _coarse(self) -> CoarseBranching:
        return CoarseBranching(
            self._problem, self._space, self._goal, self._grids, self._pruner, self._weights
        )

    @cached_property
    def _levels(self) -> tuple[BranchingLevel, ...]:
        """The levels with their branching rules."""
        coarse = self._coarse
        fine = FineBranching(self._problem, self._space, self._goal, self._grids, self._pruner, self._weights)
        return (
            BranchingLevel("micro_batch", coarse.branch_recompute),
            BranchingLevel("kept", coarse.branch_family),
            BranchingLevel("family", coarse.branch_sharding),
            BranchingLevel("sharded", fine.branch_schedule, fine.schedules_of),
            BranchingLevel("schedule", fine.branch_split, fine.splits_of, divides=True),
            BranchingLevel("split", fine.branch_recompute_layers, fine.recompute_layers_of),
        )

    def _descend(self, nodes: SearchNodes, depth: int) -> None:
        """Branches the nodes of a level by increasing bound, in growing batches: incumbents from the first
        ones prune the others."""
        if depth == len(self._levels):
            self._leaves.evaluate(nodes)
            return
        level = self._levels[depth]
        name = level.name
        order, start, size = (
            self._goal.order(nodes.lower_bound_s, nodes.device_bytes),
            0,
            FIRST_BATCHES[depth],
        )
        while start < len(order):
            self._check()
            if self._goal.incumbents:
                size = max(size, LARGE_BATCH)
            taken = self._fitting(level, nodes, order[start : start + size])
            batch = nodes.take(order[start : start + taken])
            batch = self._pruner.pruned_to(
                batch, name, self._pruner.may_improve(name, batch.lower_bound_s, batch.device_bytes)
            )
            if len(batch):
                for children in level.children(batch):
                    self._descend(children, depth + 1)
            start, size = start + taken, BATCH_GROWTH * size

    def _fitting(self, level: BranchingLevel, nodes: SearchNodes, rows: NDArray[np.intp]) -> int:
        """How many of the first `rows` have at most MOST_CHILDREN children; at least one."""
        if level.count is None or not len(rows):
            return len(rows)
        children = np.cumsum(level.count(nodes.take(rows)))
        return max(int(np.searchsorted(children, MOST_CHILDREN, side="right")), 1)
