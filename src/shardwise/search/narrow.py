"""What rows of blocks need at least: recomputed layers that memory demands, room on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Block,
    Grids,
    Paths,
    Problem,
    Split,
    block_of,
    end_s,
    family_least_bytes,
    least_bytes,
    least_host_bytes,
    least_s,
    lie_of,
    memory_room,
    most_sharded,
    room_of,
)
from shardwise.schedule import in_flight
from shardwise.search.cells import NO_SPLIT, SPLIT_FIELDS, none_of, split_at
from shardwise.search.evaluate import microbatches_of
from shardwise.search.goals import Goal
from shardwise.search.rows import Rows
from shardwise.search.sift import Sift
from shardwise.search.space import FULL, Space
from shardwise.search.variants import FAMILIES, Variants
from shardwise.strategy import HOST_MEMORY


class Narrowing:
    """Narrows rows of some grids of a space."""

    def __init__(self, problem: Problem, space: Space, grids: Grids, goal: Goal, sift: Sift) -> None:
        self._problem, self._space, self._grids, self._goal, self._sift = problem, space, grids, goal, sift
        self._layers = problem.model.layers

    def _block(self, rows: Rows, split: Split) -> Block:
        return block_of(self._problem, rows.table, split)

    def kept_with_room(self, rows: Rows) -> Rows:
        """The rows whose ranks have room under some schedule, with everything sharded as far as can be and
        no traffic for it: no schedule has fewer microbatches in flight than 1F1B."""
        parts = [none_of(rows)]
        for pp in np.unique(rows.table.pp).tolist():
            few = rows.take(np.flatnonzero(rows.table.pp == pp))
            problem, totals = self._problem, self._grids.totals_at(few.of_grid)
            block = self._block(few, replace(NO_SPLIT, largest=self._layers))
            block, ranks = replace(block, recompute_most=self._layers), few.table.dp * few.table.cp
            most = most_sharded(replace(block, recompute_layers=self._layers), ranks)
            held = np.minimum(block.microbatches, np.arange(pp, 0, -1)[:, None])
            device_bytes = family_least_bytes(problem, most, totals, held)
            limit_s = self._goal.limit_s(device_bytes)
            room = room_of(problem, block, most, totals, few.traffic, limit_s, held)
            parts.append(self._sift.with_room(few, "kept", device_bytes, room))
        return Rows.joined(parts)

    def families_with_room(self, rows: Rows, level: str, pp: int, families: Mapping[int, Variants]) -> Rows:
        """The rows of one depth, each with a family of schedules, whose ranks have room for all layers;
        before anything is sharded, in memory with everything sharded."""
        problem, totals = self._problem, self._grids.totals_at(rows.of_grid)
        family, m = FAMILIES[rows.table.schedule], microbatches_of(problem, rows.table)
        first, of_row = np.unique(family, return_inverse=True)
        each = [families[index] for index in first.tolist()]
        splits = [self._space.range_of_all(pp * variants.vpp) for variants in each]
        columns = ([getattr(split, name) for split in splits] for name in SPLIT_FIELDS)
        split = Split(*(np.array(column, dtype=np.int64)[of_row] for column in columns))
        held = np.empty((pp, len(rows)))
        for index, variants in enumerate(each):
            same = of_row == index
            held[:, same] = variants.fewest_in_flight(pp, m[same])
        block = replace(self._block(rows, split), recompute_most=self._layers)
        most = replace(block, recompute_layers=self._layers)
        if level == "family":
            most = most_sharded(most, rows.table.dp * rows.table.cp)
        device_bytes = family_least_bytes(problem, most, totals, held)
        paths = Paths(problem, block, lie_of(block), totals, rows.traffic)
        drained_s, has_ranks = (
            paths.whole_s,
            np.array([len(set(v.vpp.tolist())) == 1 for v in each], dtype=bool),
        )
        if has_ranks.any():
            drained_s = np.where(has_ranks[of_row], np.maximum(drained_s, paths.ranks_s), drained_s)
        rows = rows.replaced(bound_s=np.maximum(drained_s + end_s(problem, block, totals), rows.bound_s))
        limit_s = self._goal.limit_s(device_bytes)
        room = room_of(problem, block, most, totals, rows.traffic, limit_s, held, paths)
        return self._sift.with_room(rows, level, device_bytes, room)

    def _held(self, rows: Rows, pp: int) -> Any:
        """Microbatches in flight on each rank of rows of one depth, of its layers on average; shape (pp,
        rows)."""
        table, rank = rows.table, np.arange(pp)[:, None]
        m = microbatches_of(self._problem, table)
        return in_flight(table.schedule, table.pp, m, table.vpp, rank) / table.vpp

    def schedules_with_room(self, rows: Rows, split: Split, pp: int) -> Rows:
        """The rows of one depth whose ranks have room for all layers."""
        problem, totals = self._problem, self._grids.totals_at(rows.of_grid)
        block = replace(self._block(rows, split), recompute_most=split.largest)
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, split.largest, 0))
        lie = lie_of(block)
        paths = Paths(problem, block, lie, totals, rows.traffic)
        device_bytes = least_bytes(problem, most, lie, totals)
        limit_s, held = self._goal.limit_s(device_bytes), self._held(rows, pp)
        room = room_of(problem, block, most, totals, rows.traffic, limit_s, held, paths)
        return self._sift.with_room(rows, "schedule", device_bytes, room)

    def tightened(self, rows: Rows, split: Split, level: str, pp: int | None = None) -> tuple[Rows, Split]:
        """The rows that may fit, with their splits; of those that recompute in full, the fewest recomputed
        layers are raised to what memory demands, and the bound with them.

        Rows of one depth `pp` whose splits are open must have room on all ranks together.
        """
        block = self._block(rows, split)
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, split.largest, 0))
        totals, lie = self._grids.totals_at(rows.of_grid), lie_of(most)
        device_bytes = np.maximum(least_bytes(self._problem, most, lie, totals), rows.device_bytes)
        keep = self._sift.fits(device_bytes) & self._sift.open(level, rows.bound_s, device_bytes)
        unhosted = keep & ~self._sift.hosted(least_host_bytes(self._problem, most, lie, totals))
        if np.any(unhosted):
            lost = rows.take(unhosted)
            self._sift.add(HOST_MEMORY, lost.of_grid, lost.candidates)
            rows, split = rows.take(~unhosted), split_at(split, ~unhosted)
            device_bytes, keep = device_bytes[~unhosted], keep[~unhosted]
        rows = self._sift.sifted(rows, level, rows.bound_s, device_bytes)
        split = split_at(split, keep)
        full = np.flatnonzero(rows.table.recompute == FULL)
        if not len(full):
            return rows, split
        few, few_split = rows.take(full), split_at(split, full)
        least = self._fewest_that_fit(few, few_split, pp)
        few = few.replaced(table=few.table.replaced(recompute_layers=least))
        block = replace(self._block(few, few_split), recompute_most=few_split.largest)
        totals = self._grids.totals_at(few.of_grid)
        full_s = least_s(self._problem, block, lie_of(block), totals, few.traffic)
        layers, time_s = rows.table.recompute_layers.copy(), rows.bound_s.copy()
        layers[full], time_s[full] = least, np.maximum(full_s, few.bound_s)
        rows = rows.replaced(table=rows.table.replaced(recompute_layers=layers))
        keep = self._sift.open(level, time_s, rows.device_bytes)
        return self._sift.opened(rows.replaced(bound_s=time_s), level, keep), split_at(split, keep)

    def _fewest_that_fit(self, rows: Rows, split: Split, pp: int | None) -> NDArray[np.int64]:
        """Halves the range of recomputed layers down to the fewest with which a row may fit; all fit with the
        most."""
        problem, totals = self._problem, self._grids.totals_at(rows.of_grid)
        block = self._block(rows, split)
        lie, held = lie_of(block), None if pp is None else self._held(rows, pp)
        low, high = rows.table.recompute_layers.copy(), np.array(split.largest, dtype=np.int64)
        low = np.minimum(low, high)
        while (low < high).any():
            middle = (low + high) // 2
            tried = replace(block, recompute_layers=middle)
            fit = self._sift.fits(least_bytes(problem, tried, lie, totals))
            if held is not None:
                fit &= memory_room(problem, tried, totals, held, lie.is_v)
            high = np.where(fit, middle, high)
            low = np.where(fit, low, np.minimum(middle + 1, high))
        return high
