"""The proof that nothing in a space is faster than some time: a cover of it, regenerated.

The space is cut into cells: by grid, schedule, recomputation, offload, sharding of parameters and gradients,
sharding of the optimizer, and at last split and recomputed layers, halved until they are points.
At each level a cell is done with if it breaks a rule, if its least bytes do not fit, or if its least time is
not below the time to be beaten; what is left at the end is evaluated. Every candidate is in exactly one of
these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import SimpleNamespace

import numpy as np

from shardwise.check.bytes_floor import bytes_floor
from shardwise.check.cells import Cells, Pipeline, joined_cells
from shardwise.check.collectives import fabric_of
from shardwise.check.count import SpaceRows, chains_of
from shardwise.check.cover import Cover, OutOfTimeError
from shardwise.check.cutting import (
    count_of_splits,
    halved,
    opened,
    parts,
    rows_of_cells,
    widths,
    with_chains,
    with_offloads,
    with_pairs,
    with_recomputed,
)
from shardwise.check.figures import Figures
from shardwise.check.grounds import (
    Ground,
    breaks_grid_rule,
    grids_of,
    ground_of,
    pairs_of_ground,
)
from shardwise.check.price import evaluate
from shardwise.check.rows import Column, Rows
from shardwise.check.rules import SCHEDULE_RULES
from shardwise.check.runners_up import KIND_FIELDS, Kind
from shardwise.check.splits import FULL, Splits, splits_of
from shardwise.check.time_floor import time_floor, work_floor
from shardwise.strategy import FIELDS, OFFLOADS, RECOMPUTES

GRIDS_AT_A_TIME = 1 << 14
"""Grids of one depth that are priced together."""

VALUES_AT_A_TIME = 1 << 15
"""Stages times cells that are bounded together: columns of 256 KiB stay in the caches, and the allocator
keeps them instead of giving each back to the system."""

MARGIN = 1e-13
"""What sums in another order may differ by, relative: a floor counts for so much less."""

CELLS_AT_A_TIME = 1 << 16
"""Cells that are halved together."""


class _BeatenError(Exception):
    """A candidate was found that should not be."""


@dataclass(kw_only=True)
class Prover:
    """Covers `space`; no candidate that needs at most `usable_bytes` of its device may be below `lowest_s`.

    Those of the kinds `listed` (the values of KIND_FIELDS) may go lower, each to a time of its own.
    `is_over` says when to give up. Where `stops`, the first candidate below all these times ends the proof.
    """

    figures: Figures
    space: SpaceRows
    lowest_s: float
    usable_bytes: float
    listed: Mapping[Kind, float] = field(default_factory=dict)
    is_over: Callable[[], bool] = lambda: False
    stops: bool = True
    cover: Cover = field(default_factory=Cover)

    def run(self) -> Cover:
        """The whole cover, or as much as was needed to find a faster candidate. OutOfTimeError."""
        try:
            for pp in sorted({pp for _, _, pp, _ in self.space.degrees()}):
                self._run_pp(pp)
        except _BeatenError:
            pass
        return self.cover

    def _run_pp(self, pp: int) -> None:
        splits = {
            stages: splits_of(self.space, stages)
            for stages in sorted({pp * vpp for _, vpp in self._schedules(pp)})
        }
        for rows, alike, is_beyond in grids_of(self.figures, self.space, pp):
            self._run_grids(rows, alike, is_beyond, splits)

    def _run_grids(self, rows: Rows, alike: Column, is_beyond: Column, splits: Mapping[int, Splits]) -> None:
        """All candidates of some grids of one pp, so many `alike` each; what is beyond the target counts as
        illegal."""
        if not len(rows):
            return
        pp = int(rows.pp[0])
        broken = breaks_grid_rule(self.figures, rows) | is_beyond
        every = alike * self._chains_below(rows, lambda ranks: self.space.shards(ranks).count)
        below = alike * self._chains_below(rows, self._chains_within)
        every, below = (each * self.space.offloads().count for each in (every, below))
        in_all = sum(count_of_splits(splits[pp * vpp]) for _, vpp in self._schedules(pp))
        self.cover.illegal += int(every[broken].sum() + (every - below)[~broken].sum()) * in_all
        legal = np.flatnonzero(~broken)
        if not len(legal):
            return
        for start in range(0, len(legal), GRIDS_AT_A_TIME):
            some = legal[start : start + GRIDS_AT_A_TIME]
            ground = ground_of(self.figures, pp, rows.take(some), alike[some])
            self._run_ground(ground, below[some], splits)

    def _run_ground(self, ground: Ground, below: Column, splits: Mapping[int, Splits]) -> None:
        """All candidates of some grids; `below` counts those of each grid for each split.

        What a grid's shardings cost is asked only where some schedule leaves it.
        """
        needed = np.zeros(len(below), dtype=bool)
        none = pairs_of_ground(self.figures, self.space, ground, needed)
        left = []
        for schedule, vpp in self._schedules(ground.pp):
            if not count_of_splits(splits[ground.pp * vpp]):
                continue
            pipeline = Pipeline(
                figures=self.figures,
                fabric=fabric_of(self.figures.cluster, self.figures.efficiency),
                ground=ground,
                pairs=none,
                schedule=schedule,
                vpp=vpp,
                splits=splits[ground.pp * vpp],
            )
            cells = self._opened(pipeline, below)
            needed[cells.grid] = True
            left.append((pipeline, cells))
        if needed.any():
            pairs = pairs_of_ground(self.figures, self.space, ground, needed)
            for pipeline, cells in left:
                self._run_recomputed(replace(pipeline, pairs=pairs), cells)

    def _schedules(self, pp: int) -> list[tuple[str, int]]:
        return [
            (schedule, vpp)
            for schedule, vpp in self.space.schedules(pp)
            if self.space.keeps(schedule=schedule, vpp=vpp)
        ]

    def _chains_below(self, rows: Rows, count: Callable[[int], int]) -> Column:
        """How many shardings each row has, by the `count` over its ranks."""
        ranks, of = np.unique(rows.dp * rows.cp, return_inverse=True)
        counts = [count(int(number)) for number in ranks]
        return np.array(counts, dtype=np.int64)[of]

    def _chains_within(self, ranks: int) -> int:
        """Shardings over so many ranks that the target can say."""
        if not self.space.beyond.shards:
            return self.space.shards(ranks).count
        return sum(map(len, chains_of(self.space, ranks).values()))

    def _opened(self, pipeline: Pipeline, below: Column) -> Cells:
        """The cells of one schedule, one for each grid, that may hold something faster; `below` counts the
        candidates of each grid for each split."""
        count = count_of_splits(pipeline.splits)
        broken = self._breaks_schedule_rule(pipeline)
        self.cover.illegal += int(below[broken].sum()) * count
        grid = np.flatnonzero(~broken & (below > 0))
        if not self._asks_for_time:
            return opened(pipeline, grid, below[grid])
        # What holds of every schedule goes first: it is one number for each grid, whatever the stages.
        seconds = work_floor(pipeline)[grid]
        grid = grid[self._not_bounded(seconds, below[grid] * count, self.lowest_s)]
        cells = opened(pipeline, grid, below[grid])
        found = [cells.take(np.arange(0))]
        for part in parts(cells, VALUES_AT_A_TIME // pipeline.stages):
            if self.is_over():
                raise OutOfTimeError
            seconds = time_floor(pipeline, part, is_paired=False, is_sharded=False)
            # Whole splits, whatever is recomputed.
            found.append(part.take(self._not_bounded(seconds, part.weight * count, self.lowest_s)))
        return joined_cells(found)

    def _breaks_schedule_rule(self, pipeline: Pipeline) -> Column:
        rows = pipeline.ground.rows
        grid = SimpleNamespace(**{name: getattr(rows, name) for name in FIELDS})
        grid.schedule, grid.vpp = pipeline.schedule, pipeline.vpp
        found = np.zeros(len(rows), dtype=bool)
        for rule in SCHEDULE_RULES.values():
            found |= np.asarray(rule(grid, self.figures.limits, self.figures.job))
        return found

    def _run_recomputed(self, pipeline: Pipeline, cells: Cells) -> None:
        """The next level: recomputation."""
        for part in parts(cells, CELLS_AT_A_TIME):
            found = with_recomputed(pipeline, part)
            if pipeline.stages == 2:
                # Of all splits neither stage has a layer for certain; of each half one has half of them.
                found = halved(found)
            left = self._surviving(pipeline, found, is_paired=False, is_sharded=False)
            self._run_offloads(pipeline, left)

    def _run_offloads(self, pipeline: Pipeline, cells: Cells) -> None:
        """The next level: offload."""
        kinds = self.space.offloads().values["offload"]
        found = with_offloads(cells, [place for place, kind in enumerate(OFFLOADS) if kind in kinds])
        self._run_pairs(pipeline, self._surviving(pipeline, found, is_paired=False, is_sharded=False))

    def _run_pairs(self, pipeline: Pipeline, cells: Cells) -> None:
        """The next level: sharding of parameters and gradients."""
        pairs = pipeline.pairs
        for part in parts(cells, CELLS_AT_A_TIME // max(int(pairs.number.max()), 1)):
            found = with_pairs(pipeline, part)
            left = self._surviving(pipeline, found, is_paired=True, is_sharded=False)
            self._run_chains(pipeline, left)

    def _run_chains(self, pipeline: Pipeline, cells: Cells) -> None:
        """The next level: sharding of the optimizer; then splits."""
        for part in parts(cells, CELLS_AT_A_TIME // 8):
            left = self._surviving(pipeline, with_chains(pipeline, part), is_paired=True, is_sharded=True)
            self._run_boxes(pipeline, left)

    def _run_boxes(self, pipeline: Pipeline, cells: Cells) -> None:
        """The last levels: boxes of splits and recomputed layers, halved until they are points."""
        waiting = deque(parts(cells, CELLS_AT_A_TIME))
        while waiting:
            part = waiting.pop()
            is_point = widths(part.box).max(axis=0) == 0
            self._evaluate(pipeline, part.take(np.flatnonzero(is_point)))
            open_ = part.take(np.flatnonzero(~is_point))
            if len(open_):
                left = self._surviving(pipeline, halved(open_), is_paired=True, is_sharded=True)
                waiting.extend(parts(left, CELLS_AT_A_TIME))

    def _surviving(self, pipeline: Pipeline, cells: Cells, *, is_paired: bool, is_sharded: bool) -> Cells:
        """The cells that may hold something faster that fits; the others are counted."""
        cells = cells.take(np.flatnonzero(pipeline.splits.count(cells.recompute, cells.box) > 0))
        found = [cells.take(np.arange(0))]
        for part in parts(cells, VALUES_AT_A_TIME // pipeline.stages):
            if self.is_over():
                raise OutOfTimeError
            part = self._fitting(pipeline, part, is_paired=is_paired)
            if not self._asks_for_time:
                found.append(part)
                continue
            counts = part.weight * pipeline.splits.count(part.recompute, part.box)
            seconds = time_floor(pipeline, part, is_paired=is_paired, is_sharded=is_sharded)
            lowest_s = self._lowest_s(pipeline, part)
            found.append(part.take(self._not_bounded(seconds, counts, lowest_s)))
        return joined_cells(found)

    def _lowest_s(self, pipeline: Pipeline, cells: Cells) -> Column:
        """The time to be beaten by each cell whose kind is known."""
        found = np.full(len(cells), self.lowest_s)
        rows = pipeline.ground.rows
        for (*degrees, schedule, recompute), lowest_s in self.listed.items():
            if schedule == pipeline.schedule:
                is_listed = cells.recompute == RECOMPUTES.index(str(recompute))
                for name, degree in zip(KIND_FIELDS, degrees, strict=False):
                    is_listed = is_listed & (getattr(rows, name)[cells.grid] == degree)
                found[is_listed] = lowest_s
        return found

    @property
    def _asks_for_time(self) -> bool:
        """Whether there is a time to be beaten; else no floor of it is asked for."""
        return self.lowest_s < inf or bool(self.listed)

    def _not_bounded(self, seconds: Column, counts: Column, lowest_s: Column | float) -> Column:
        """Places of the cells whose least time is below the time to be beaten; the others are counted."""
        is_left = seconds * (1 - MARGIN) < lowest_s
        if not is_left.all():
            self.cover.bounded += int(counts[~is_left].sum())
            self.cover.least_s = min(self.cover.least_s, float(seconds[~is_left].min()))
        return np.flatnonzero(is_left)

    def _fitting(self, pipeline: Pipeline, cells: Cells, *, is_paired: bool) -> Cells:
        """The cells that may fit, without the numbers of recomputed layers that are too few; the others are
        counted."""
        fits = self._may_fit(pipeline, cells, cells.box.layers_high, is_paired=is_paired)
        self._count_unfitting(pipeline, cells.take(np.flatnonzero(~fits)))
        cells = cells.take(np.flatnonzero(fits))
        low, high = cells.box.layers_low, cells.box.layers_high
        at = np.flatnonzero((cells.recompute == FULL) & (high > low))
        if not len(at):
            return cells
        some = cells.take(at)
        # The least number that may fit lies in (too_few, enough].
        too_few, enough = some.box.layers_low - 1, some.box.layers_high
        while (enough - too_few > 1).any():
            middle = (too_few + enough) // 2
            may_fit = self._may_fit(pipeline, some, np.maximum(middle, 1), is_paired=is_paired)
            may_fit |= middle == too_few
            enough = np.where(may_fit & (middle > too_few), middle, enough)
            too_few = np.where(may_fit, too_few, middle)
        out = replace(some, box=replace(some.box, layers_high=too_few))
        self._count_unfitting(pipeline, out.take(np.flatnonzero(too_few >= some.box.layers_low)))
        least = low.copy()
        least[at] = enough
        cells = replace(cells, box=replace(cells.box, layers_low=least))
        # Of a box of which one number alone was said more, that may have been the last candidate.
        return cells.take(np.flatnonzero(pipeline.splits.count(cells.recompute, cells.box) > 0))

    def _may_fit(self, pipeline: Pipeline, cells: Cells, most: Column, *, is_paired: bool) -> Column:
        device, host = bytes_floor(pipeline, cells, most, is_paired=is_paired)
        fits: Column = (device * (1 - MARGIN) <= self.usable_bytes) & (
            host * (1 - MARGIN) <= self.figures.host_capacity_bytes
        )
        return fits

    def _count_unfitting(self, pipeline: Pipeline, cells: Cells) -> None:
        if len(cells):
            counts = cells.weight * pipeline.splits.count(cells.recompute, cells.box)
            self.cover.unfitting += int(counts.sum())

    def _evaluate(self, pipeline: Pipeline, cells: Cells) -> None:
        """The last cells: each is one candidate, and those that cost the same."""
        if not len(cells):
            return
        if self.is_over():
            raise OutOfTimeError
        rows = rows_of_cells(pipeline, cells)
        found = evaluate(self.figures, rows)
        fits = found.device_bytes <= self.usable_bytes
        fits &= found.host_bytes <= self.figures.host_capacity_bytes
        self.cover.unfitting += int(cells.weight[~fits].sum())
        self.cover.evaluated += int(cells.weight[fits].sum())
        if fits.any():
            seconds = np.where(fits, found.step_time_s, inf)
            place = int(seconds.argmin())
            self.cover.least_s = min(self.cover.least_s, float(seconds[place]))
            beaten = np.flatnonzero(
                seconds < np.minimum(self._lowest_s(pipeline, cells), self.cover.faster_s)
            )
            if len(beaten):
                place = int(beaten[seconds[beaten].argmin()])
                self.cover.faster, self.cover.faster_s = rows.take([place]), float(seconds[place])
                self.cover.faster_bytes = float(found.device_bytes[place])
                if self.stops and self.cover.faster_s < min(self.listed.values(), default=self.lowest_s):
                    raise _BeatenError
