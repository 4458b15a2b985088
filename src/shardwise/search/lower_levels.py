"""The lower levels of the tree: schedules, splits, recomputed layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    LayerCounts,
    Split,
    Subproblem,
    Totals,
    distinct_rows,
    known_split,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
)
from shardwise.search.cells import (
    FEW_PAIRS,
    PAIRS_PER_BATCH,
    SPLIT_FIELDS,
    alike_nodes,
    empty_like,
    join_splits,
    map_distinct,
    slices,
    take_splits,
)
from shardwise.search.evaluate import microbatches_of
from shardwise.search.level import Branching
from shardwise.search.ranges import Ranges, ranges_from
from shardwise.search.rows import SearchNodes
from shardwise.search.space import FULL, expanded
from shardwise.search.variants import FAMILIES, Variants
from shardwise.strategy import MEMORY, Column


class FineBranching(Branching):
    """From rows whose sharding is known to rows that are known but for their optimizer states."""

    def branch_schedule(self, nodes: SearchNodes) -> SearchNodes:
        """Schedules with their virtual stages."""
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
        """Every row (down) with every schedule of its family (across); and what their splits have at
        least."""
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
        """Row, option and bound of the combinations that may matter; the others are counted.

        Combinations without candidates are none.
        """
        problem, layer_counts = self.problem, layer_counts_of(block)
        totals = self.grids.totals_at(nodes.of_grid[:, None])
        traffic = nodes.traffic.taken(np.arange(len(nodes))[:, None])
        time_s = np.maximum(
            lower_bound_s(problem, block, layer_counts, totals, traffic), nodes.lower_bound_s[:, None]
        )
        device_bytes = nodes.device_bytes[:, None]
        if self.goal.weighs_memory:
            device_bytes = np.maximum(device_bytes, self._fully_recomputed_bytes(block, layer_counts, totals))
        row, option = self.improving_options(nodes, time_s, device_bytes, candidates, level)
        return row, option, time_s[row, option]

    def branch_split(self, nodes: SearchNodes) -> SearchNodes:
        """First and last stages."""
        table, parts, few = nodes.table, [empty_like(nodes)], np.zeros(len(nodes), dtype=bool)
        first, of_each = distinct_rows([table.pp, table.vpp, table.schedule])
        for index, row in enumerate(first.tolist()):
            is_alike, count = of_each == index, len(self._end_layers(table.pp[row] * table.vpp[row])[0])
            if np.count_nonzero(is_alike) * count < FEW_PAIRS:
                few |= is_alike
                continue
            for same in alike_nodes(nodes, is_alike, count):
                for part in slices(len(same), max(PAIRS_PER_BATCH // max(count, 1), 1)):
                    parts.append(self._split_alike(nodes.take(same[part])))
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
        """The rows under a mask, in parts that have so many splits together."""
        index = np.flatnonzero(mask)
        if len(index):
            stages = (nodes.table.pp * nodes.table.vpp)[index]
            below = np.cumsum(map_distinct(lambda n: len(self._end_layers(n)[0]), stages))
            yield from np.split(index, np.flatnonzero(np.diff(below // PAIRS_PER_BATCH)) + 1)

    def _split_each(self, nodes: SearchNodes) -> SearchNodes:
        """The same for rows of several schedules that have few: every row's splits, one after another."""
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
        block, totals = self.block(each, split), self.grids.totals_at(each.of_grid)
        block, layer_counts = replace(block, recompute_most=split.largest), layer_counts_of(block)
        time_s = np.maximum(
            lower_bound_s(self.problem, block, layer_counts, totals, each.traffic), each.lower_bound_s
        )
        device_bytes = (
            self._fully_recomputed_bytes(block, layer_counts, totals) if self.goal.weighs_memory else None
        )
        return self.pruner.pruned(each, "split", time_s, device_bytes)

    def _fully_recomputed_bytes(self, block: Subproblem, layer_counts: LayerCounts, totals: Totals) -> Any:
        """The least bytes with as much recomputed as may be."""
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, block.split.largest, 0))
        return lower_bound_bytes(self.problem, most, layer_counts, totals)

    def _split_alike(self, nodes: SearchNodes) -> SearchNodes:
        """The same for rows of one schedule: every row (down) with every split (across)."""
        space, table = self.space, nodes.table
        stages = int(table.pp[0] * table.vpp[0])
        ends = space.splits(stages)
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
        """Numbers of recomputed layers; fewer than fit are rejected."""
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
        """Rows with each number of recomputed layers in their ranges, each of which has a row's candidates:
        ranges are bounded, and those that may matter halved, until each is one number."""
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
        """Rows with their ranges, those that may matter, and which these are: the least time goes with the
        fewest recomputed layers, the least memory with the most."""
        problem, row = self.problem, ranges.row
        table = nodes.table.take(row).replaced(recompute_layers=ranges.least)
        below = nodes.children(row, table, nodes.candidates[row] * ranges.width)
        block = replace(self.block(below, self.split_of(table)), recompute_most=ranges.most)
        layer_counts, totals = layer_counts_of(block), self.grids.totals_at(below.of_grid)
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
