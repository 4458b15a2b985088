"""The lower levels of the tree: schedules, splits, recomputed layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Block, Lie, Split, Totals, distinct_rows, known_split, least_bytes, least_s, lie_of
from shardwise.search.cells import (
    CELLS_AT_A_TIME,
    FEW_CELLS,
    SPLIT_FIELDS,
    alike_rows,
    asked_once,
    none_of,
    slices,
    split_at,
    splits_joined,
)
from shardwise.search.evaluate import microbatches_of
from shardwise.search.level import Level
from shardwise.search.ranges import Ranges, ranges_from
from shardwise.search.rows import Rows
from shardwise.search.space import FULL, expanded
from shardwise.search.variants import FAMILIES, Variants
from shardwise.strategy import MEMORY, Column


class LowerLevels(Level):
    """From rows whose sharding is known to rows that are known but for their optimizer states."""

    def scheduled(self, rows: Rows) -> Rows:
        """Schedules with their virtual stages."""
        parts = [none_of(rows)]
        for pp in np.unique(rows.table.pp).tolist():
            variants, is_deep = self.variants(pp), rows.table.pp == pp
            if np.count_nonzero(is_deep) * len(variants) < FEW_CELLS:
                below = [self._scheduled_alike(rows.take(is_deep), pp, variants)]
            else:
                below = [
                    self._scheduled_alike(rows.take(same[part]), pp, few)
                    for family, few in variants.families.items()
                    for same in alike_rows(
                        rows, is_deep & (FAMILIES[rows.table.schedule] == family), len(few)
                    )
                    for part in slices(len(same), max(CELLS_AT_A_TIME // len(few), 1))
                ]
            if below:
                kept, split = Rows.joined([some for some, _ in below]), splits_joined([of for _, of in below])
                for part in slices(len(kept), CELLS_AT_A_TIME // pp):
                    tight = self.narrowing.tightened(kept.take(part), split_at(split, part), "schedule", pp)
                    parts.append(self.narrowing.schedules_with_room(*tight, pp))
        return Rows.joined(parts)

    def _scheduled_alike(self, rows: Rows, pp: int, variants: Variants) -> tuple[Rows, Split]:
        """Every row (down) with every schedule of its family (across); and what their splits have at
        least."""
        family, m = FAMILIES[rows.table.schedule], microbatches_of(self.problem, rows.table)
        legal = asked_once(self.space.count_legal, rows.table.pp, m, rows.table.recompute, family)
        candidates = self.shared_out(rows, pp, variants, legal)
        candidates[family[:, None] != FAMILIES[variants.schedule]] = 0
        space, kind = self.space, rows.table.recompute
        stages = (pp * variants.vpp).tolist()
        ranges = [space.split_range(n) for n in stages]
        split = Split(*(np.array([getattr(r, name) for r in ranges])[None] for name in SPLIT_FIELDS))
        fewest = np.array([[self.fewest_on(n, kind) for n in stages] for kind in range(FULL + 1)])
        block = self.spread(rows, split, recompute_layers=fewest[kind], recompute_most=split.largest)
        block = replace(block, schedule=variants.schedule[None], vpp=variants.vpp[None])
        row, variant, time_s = self._open_cells(rows, block, candidates, "schedule")
        table = rows.table.take(row).replaced(
            schedule=variants.schedule[variant], vpp=variants.vpp[variant],
            recompute_layers=block.recompute_layers[row, variant],
        )  # fmt: skip
        kept = rows.below(row, table, candidates[row, variant]).replaced(bound_s=time_s)
        split = Split(
            *(np.broadcast_to(getattr(split, name), candidates.shape)[row, variant] for name in SPLIT_FIELDS)
        )
        return kept, split

    def _open_cells(
        self, rows: Rows, block: Block, candidates: NDArray[np.int64], level: str
    ) -> tuple[Any, Any, Any]:
        """Row, option and bound of the combinations that may matter; the others are counted.

        Combinations without candidates are none.
        """
        problem, lie = self.problem, lie_of(block)
        totals = self.grids.totals_at(rows.of_grid[:, None])
        traffic = rows.traffic.taken(np.arange(len(rows))[:, None])
        time_s = np.maximum(least_s(problem, block, lie, totals, traffic), rows.bound_s[:, None])
        device_bytes = rows.device_bytes[:, None]
        if self.goal.weighs_memory:
            device_bytes = np.maximum(device_bytes, self._most_bytes(block, lie, totals))
        row, option = self.open_options(rows, time_s, device_bytes, candidates, level)
        return row, option, time_s[row, option]

    def split(self, rows: Rows) -> Rows:
        """First and last stages."""
        table, parts, few = rows.table, [none_of(rows)], np.zeros(len(rows), dtype=bool)
        first, of_each = distinct_rows([table.pp, table.vpp, table.schedule])
        for index, row in enumerate(first.tolist()):
            is_alike, count = of_each == index, len(self._ends(table.pp[row] * table.vpp[row])[0])
            if np.count_nonzero(is_alike) * count < FEW_CELLS:
                few |= is_alike
                continue
            for same in alike_rows(rows, is_alike, count):
                for part in slices(len(same), max(CELLS_AT_A_TIME // max(count, 1), 1)):
                    parts.append(self._split_alike(rows.take(same[part])))
        parts.extend(self._split_each(rows.take(part)) for part in self._parts_of_few(rows, few))
        below = Rows.joined(parts)
        split = self.split_of(below.table)
        return Rows.joined([
            self.narrowing.tightened(below.take(part), split_at(split, part), "split")[0]
            for part in slices(len(below), CELLS_AT_A_TIME)
        ])  # fmt: skip

    def _ends(self, stages: Any) -> tuple[Column, Column]:
        """Layers of the first and of the last stage of each split."""
        splits = self.space.splits(int(stages))
        return splits["first_stage_layers"], splits["last_stage_layers"]

    def _parts_of_few(self, rows: Rows, mask: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
        """The rows under a mask, in parts that have so many splits together."""
        index = np.flatnonzero(mask)
        if len(index):
            stages = (rows.table.pp * rows.table.vpp)[index]
            below = np.cumsum(asked_once(lambda n: len(self._ends(n)[0]), stages))
            yield from np.split(index, np.flatnonzero(np.diff(below // CELLS_AT_A_TIME)) + 1)

    def _split_each(self, rows: Rows) -> Rows:
        """The same for rows of several schedules that have few: every row's splits, one after another."""
        space, stages = self.space, rows.table.pp * rows.table.vpp
        parent, table = expanded(rows.table, [stages], space.splits)
        split = self.split_of(table)
        numbers = asked_once(
            lambda kind, most: len(space.recompute_layers(kind, most)), table.recompute, split.largest
        )
        below = asked_once(space.count_splits, stages, rows.table.recompute)
        candidates = numbers * (rows.candidates // np.maximum(below, 1))[parent]
        layers = np.minimum(table.recompute_layers, split.largest)
        each = rows.below(parent, table.replaced(recompute_layers=layers), candidates)
        each, split = each.take(candidates > 0), split_at(split, candidates > 0)
        block, totals = self.block(each, split), self.grids.totals_at(each.of_grid)
        block, lie = replace(block, recompute_most=split.largest), lie_of(block)
        time_s = np.maximum(least_s(self.problem, block, lie, totals, each.traffic), each.bound_s)
        device_bytes = self._most_bytes(block, lie, totals) if self.goal.weighs_memory else None
        return self.sift.sifted(each, "split", time_s, device_bytes)

    def _most_bytes(self, block: Block, lie: Lie, totals: Totals) -> Any:
        """The least bytes with as much recomputed as may be."""
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, block.split.largest, 0))
        return least_bytes(self.problem, most, lie, totals)

    def _split_alike(self, rows: Rows) -> Rows:
        """The same for rows of one schedule: every row (down) with every split (across)."""
        space, table = self.space, rows.table
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
        below = asked_once(lambda kind: space.count_splits(stages, kind), table.recompute)
        candidates = numbers[table.recompute] * (rows.candidates // np.maximum(below, 1))[:, None]
        layers = np.minimum(table.recompute_layers[:, None], split.largest)
        block = self.spread(rows, split, recompute_layers=layers, recompute_most=split.largest)
        block = replace(
            block, schedule=table.schedule[:1, None], vpp=table.vpp[:1, None], pp=table.pp[:1, None]
        )
        row, option, time_s = self._open_cells(rows, block, candidates, "split")
        table = table.take(row).replaced(
            first_stage_layers=ends["first_stage_layers"][option],
            last_stage_layers=ends["last_stage_layers"][option],
            recompute_layers=layers[row, option],
        )
        return rows.below(row, table, candidates[row, option]).replaced(bound_s=time_s)

    def recomputed(self, rows: Rows) -> Rows:
        """Numbers of recomputed layers; fewer than fit are rejected."""
        is_full = rows.table.recompute == FULL
        plain, full = rows.take(~is_full), rows.take(is_full)
        if not len(full):
            return plain
        ranges, fewer = ranges_from(
            full.table.recompute_layers,
            self.split_of(full.table).largest,
            lambda most: self.space.recompute_layers(FULL, most),
        )
        full = full.replaced(candidates=full.candidates // (fewer + ranges.width))
        self.sift.add(MEMORY, full.of_grid, full.candidates * fewer)
        return Rows.joined([plain, self._of_ranges(full, ranges)])

    def _of_ranges(self, rows: Rows, ranges: Ranges) -> Rows:
        """Rows with each number of recomputed layers in their ranges, each of which has a row's candidates:
        ranges are bounded, and those that may matter halved, until each is one number."""
        parts, places = [none_of(rows)], [ranges.row[:0]]
        while len(ranges):
            ranges = ranges.halved()
            below, keep = self._bounded(rows, ranges)
            ranges = ranges.take(keep)
            is_one = ranges.width == 1
            parts.append(below.take(is_one))
            places.append(ranges.row[is_one] * (self.space.layers + 1) + ranges.least[is_one])
            ranges = ranges.take(~is_one)
        return Rows.joined(parts).take(np.argsort(np.concatenate(places), kind="stable"))

    def _bounded(self, rows: Rows, ranges: Ranges) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows with their ranges, those that may matter, and which these are: the least time goes with the
        fewest recomputed layers, the least memory with the most."""
        problem, row = self.problem, ranges.row
        table = rows.table.take(row).replaced(recompute_layers=ranges.least)
        below = rows.below(row, table, rows.candidates[row] * ranges.width)
        block = replace(self.block(below, self.split_of(table)), recompute_most=ranges.most)
        lie, totals = lie_of(block), self.grids.totals_at(below.of_grid)
        time_s = np.maximum(least_s(problem, block, lie, totals, below.traffic), below.bound_s)
        if self.goal.weighs_memory:
            most = replace(block, recompute_layers=ranges.most)
            device_bytes = np.maximum(least_bytes(problem, most, lie, totals), below.device_bytes)
            below = below.replaced(device_bytes=device_bytes)
        keep = self.sift.open("layers", time_s, below.device_bytes)
        return self.sift.opened(below.replaced(bound_s=time_s), "layers", keep), keep
