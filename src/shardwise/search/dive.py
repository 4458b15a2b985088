"""From grids down to evaluated strategies: one part of the search.

    grids -> what is kept -> families of schedules -> what is sharded -> schedules -> splits
          -> recomputed layers -> states -> evaluate

On every level what cannot fit is rejected, and what cannot matter any more is cut, with everything below it;
the rest is divided further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Block,
    Grids,
    Problem,
    Split,
    Totals,
    block_of,
    distinct_rows,
    grid_least_s,
    grid_work_s,
    known_split,
    least_bytes,
    least_s,
    lie_of,
    priced_grids,
    traffic_table,
)
from shardwise.search.cells import (
    BLOCK_FIELDS,
    CELLS_AT_A_TIME,
    FEW_CELLS,
    NO_SPLIT,
    NO_TRAFFIC_ROWS,
    SPLIT_FIELDS,
    alike_rows,
    asked_once,
    legal_cells,
    none_of,
    slices,
)
from shardwise.search.evaluate import microbatches_of
from shardwise.search.fates import Fates
from shardwise.search.goals import Goal
from shardwise.search.leaves import Leaves
from shardwise.search.narrow import Narrowing
from shardwise.search.rows import Rows
from shardwise.search.sift import Sift
from shardwise.search.space import FAMILIES, FULL, Space, Variants, expanded
from shardwise.strategy import MEMORY, Column, StrategyTable

FIRST_PARTS = (512, 2048, 4096, 1 << 14, 2048, 1 << 14)
"""Rows of each level that are divided first, before anything is found."""

WORTH_A_LOOK = 512
"""Rows of a family of schedules that are bounded before they are sharded; fewer are not worth it."""

LARGE_PART, PART_GROWTH = 1 << 14, 8
"""Rows that are divided first once something is found, and how many times more in each further part."""


class Dive:
    """Searches everything below some grids (with their micro-batch sizes).

    `weights` says how many grids each row stands for. What is found goes to `goal`; `fates` says afterwards
    what became of the candidates. `without` names bounds that are not used; `check` is called now and then,
    and may raise.
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
        self.fates = Fates.of(len(table))
        self._sift = Sift(problem, goal, self.fates, is_exhaustive=exhaustive, without=without)
        self._leaves = Leaves(problem, space, goal, self._sift, weights, self._totals_at, check)

    def run(self) -> None:
        """Searches; afterwards every candidate below the grids is counted in `fates`."""
        if not len(self._table):
            return
        self._descend(self._micro_batches(self._legal()), 0)

    @cached_property
    def _grids(self) -> Grids:
        return priced_grids(self._problem, self._table)

    def _totals_at(self, of_grid: Any) -> Totals:
        return self._grids.totals_at(of_grid)

    @cached_property
    def _narrowing(self) -> Narrowing:
        return Narrowing(self._problem, self._space, self._grids, self._goal, self._sift)

    def _descend(self, rows: Rows, depth: int) -> None:
        """Goes on with rows of a level by increasing bound, a growing part at a time: what is found below the
        first of them cuts the others."""
        if depth == len(self._levels):
            self._leaves.evaluate(rows)
            return
        name, divided = self._levels[depth]
        order, start, size = np.argsort(rows.bound_s, kind="stable"), 0, FIRST_PARTS[depth]
        while start < len(order):
            self._check()
            if self._goal.found:
                size = max(size, LARGE_PART)
            part = rows.take(order[start : start + size])
            open_rows = self._sift.open(name, part.bound_s)
            lost = part.take(~open_rows)
            self._sift.cut(name, lost.of_grid, lost.candidates)
            if open_rows.any():
                self._descend(divided(part.take(open_rows)), depth + 1)
            start, size = start + size, PART_GROWTH * size

    @cached_property
    def _levels(self) -> tuple[tuple[str, Callable[[Rows], Rows]], ...]:
        """How rows of each level are divided: the level's name, and the next level's rows."""
        return (
            ("micro_batch", self._kept),
            ("kept", self._families),
            ("family", self._sharded),
            ("sharded", self._scheduled),
            ("schedule", self._split),
            ("split", self._recomputed),
        )

    # Levels.

    def _legal(self) -> Rows:
        """The grids, each with the candidates whose schedule is legal."""
        space, table = self._space, self._table
        pp, m = table.pp, microbatches_of(self._problem, table)
        legal = asked_once(
            lambda ranks, microbatches: sum(
                space.count_legal(ranks, microbatches, int(kind)) for kind in space.recomputes
            ),
            pp,
            m,
        )
        below = len(space.offloads) * space.count_shards(table.dp * table.cp) * self._weights
        return Rows(table, np.arange(len(table)), np.zeros(len(table)), legal * below)

    def _micro_batches(self, rows: Rows) -> Rows:
        """Grids with their micro-batch sizes, by all of their work."""
        block = self._block(rows, NO_SPLIT)
        return self._sift.sifted(rows, "micro_batch", grid_work_s(self._problem, block, self._grids.totals))

    def _block(self, rows: Rows, split: Split) -> Block:
        return block_of(self._problem, rows.table, split)

    def _kept(self, rows: Rows) -> Rows:
        """What is recomputed and offloaded; states are sharded as far as they can be."""
        space = self._space
        kinds, offloads = np.meshgrid(space.recomputes, space.offloads, indexing="ij")
        options = {"recompute": kinds.ravel(), "offload": offloads.ravel()}
        parent, table = expanded(rows.table, [0 * rows.table.tp], lambda _: options)
        m = microbatches_of(self._problem, table)
        legal = asked_once(space.count_legal, table.pp, m, table.recompute)
        candidates = legal * (space.count_shards(table.dp * table.cp) * self._weights[rows.of_grid[parent]])
        least = asked_once(self._fewest_layers, table.pp, table.recompute)
        common = asked_once(self._common_states, table.dp * table.cp)
        table = table.replaced(recompute_layers=least, optim_shard=common)
        rows = Rows(table, rows.of_grid[parent], rows.bound_s[parent], candidates)
        rows = rows.take(candidates > 0)
        block = replace(self._block(rows, NO_SPLIT), recompute_most=self._space.layers)
        totals = self._grids.totals_at(rows.of_grid)
        time_s = grid_least_s(self._problem, block, totals, rows.traffic)
        rows = self._sift.sifted(rows, "kept", np.maximum(time_s, rows.bound_s))
        return self._narrowing.kept_with_room(rows)

    def _fewest_layers(self, pp: int, recompute: int) -> int:
        """Layers of a stage that any schedule of a pipeline recomputes at least, where it recomputes in
        full."""
        stages = np.unique(pp * self._space.variants(pp).vpp)
        return min((self._fewest_on(int(n), recompute) for n in stages), default=0)

    def _fewest_on(self, stages: int, recompute: int) -> int:
        """The same of so many stages."""
        space = self._space
        if space.is_core and recompute == FULL:
            return int(space.split_range(stages).largest)
        return int(space.recompute_layers(recompute, space.layers).min(initial=space.layers))

    def _common_states(self, ranks: int) -> int:
        """A degree that all of the optimizer's states over so many ranks divide."""
        return int(np.lcm.reduce(self._space.shards(ranks)["optim_shard"], initial=1))

    def _families(self, rows: Rows) -> Rows:
        """Families of schedules: those that have room, with everything sharded as far as can be and no
        traffic for it."""
        parts = [none_of(rows)]
        for pp in np.unique(rows.table.pp).tolist():
            same = rows.take(np.flatnonzero(rows.table.pp == pp))
            for variants in self._variants(pp).families.values():
                candidates = self._scheduled_candidates(same, pp, variants).sum(axis=1)
                few = same.replaced(candidates=candidates).take(candidates > 0)
                few = few.replaced(table=few.table.replaced(
                    schedule=np.broadcast_to(variants.schedule[:1], (len(few),)),
                    vpp=np.broadcast_to(variants.vpp.min(keepdims=True), (len(few),)),
                ))  # fmt: skip
                if len(few) >= WORTH_A_LOOK:
                    few = self._family_with_room(few, "family", pp, variants)
                parts.append(few)
        return Rows.joined(parts)

    def _variants(self, pp: int) -> Variants:
        """Schedules of a pipeline of so many ranks that has enough layers for them."""
        variants = self._space.variants(pp)
        return variants.take(pp * variants.vpp <= self._space.layers)

    def _family_with_room(self, rows: Rows, level: str, pp: int, variants: Variants) -> Rows:
        """The rows of one depth and one family of schedules that fit and may matter, and whose ranks have
        room for all layers."""
        parts = [none_of(rows)]
        for same in alike_rows(rows, np.ones(len(rows), dtype=bool), 1):
            parts.append(self._narrowing.family_with_room(rows.take(same), level, pp, variants))
        return Rows.joined(parts)

    def _sharded(self, rows: Rows) -> Rows:
        """Degrees of parameters and gradients."""
        table, parts = rows.table, [none_of(rows).replaced(traffic=NO_TRAFFIC_ROWS)]
        first, of_each = distinct_rows([table.dp * table.cp, table.pp])
        for index, row in enumerate(first.tolist()):
            ranks, pp = int(table.dp[row] * table.cp[row]), int(table.pp[row])
            options = self._space.sharings(ranks)
            same = np.flatnonzero(of_each == index)
            for part in slices(len(same), max(CELLS_AT_A_TIME // max(len(options["states"]), 1), 1)):
                parts.append(self._sharded_alike(rows.take(same[part]), ranks, options))
        sharded = Rows.joined(parts)
        parts = [none_of(sharded)]
        for pp in np.unique(sharded.table.pp).tolist():
            for family, variants in self._variants(pp).families.items():
                same = (sharded.table.pp == pp) & (FAMILIES[sharded.table.schedule] == family)
                parts.append(self._family_with_room(sharded.take(same), "sharded", pp, variants))
        return Rows.joined(parts)

    def _sharded_alike(self, rows: Rows, ranks: int, options: Mapping[str, Column]) -> Rows:
        """The same for rows of one number of ranks: every row (down) with every option (across)."""
        problem, grids = self._problem, self._grids
        used, place = np.unique(rows.of_grid, return_inverse=True)
        param, grad, optim = (options[name] for name in ("param_shard", "grad_shard", "optim_shard"))
        traffic = traffic_table(problem, grids, used, np.unique([param, grad]))
        block = self._spread(rows, NO_SPLIT, recompute_most=self._space.layers)
        block = replace(block, optim_shard=optim[None])
        totals = grids.totals_at(rows.of_grid[:, None])
        cells = traffic.at(param[None], grad[None], place[:, None])
        time_s = np.maximum(grid_least_s(problem, block, totals, cells), rows.bound_s[:, None])
        per_state = rows.candidates // int(self._space.count_shards(np.array([ranks]))[0])
        candidates = per_state[:, None] * options["states"][None]
        row, option = self._open_options(rows, time_s, candidates, "sharded")
        table = rows.table.take(row).replaced(
            param_shard=param[option], grad_shard=grad[option], optim_shard=optim[option]
        )
        return Rows(
            table, rows.of_grid[row], time_s[row, option], candidates[row, option],
            traffic.at(param[option], grad[option], place[row]),
        )  # fmt: skip

    def _open_options(
        self, rows: Rows, time_s: Any, candidates: NDArray[np.int64], level: str, device_bytes: Any = None
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Row and option of the combinations that may matter; the others are counted. Combinations without
        candidates are none."""
        keep = self._sift.open(level, time_s, device_bytes)
        self._sift.cut(level, rows.of_grid, np.where(keep, 0, candidates).sum(axis=1))
        row, option = np.nonzero(keep & (candidates > 0))
        return row, option

    def _scheduled(self, rows: Rows) -> Rows:
        """Schedules with their virtual stages."""
        parts = [none_of(rows)]
        for pp in np.unique(rows.table.pp).tolist():
            variants, is_deep = self._variants(pp), rows.table.pp == pp
            if np.count_nonzero(is_deep) * len(variants) < FEW_CELLS:
                parts.append(self._scheduled_alike(rows.take(is_deep), pp, variants))
                continue
            for family, few in variants.families.items():
                for same in alike_rows(rows, is_deep & (FAMILIES[rows.table.schedule] == family), len(few)):
                    for part in slices(len(same), max(CELLS_AT_A_TIME // len(few), 1)):
                        parts.append(self._scheduled_alike(rows.take(same[part]), pp, few))
        return Rows.joined(parts)

    def _scheduled_candidates(self, rows: Rows, pp: int, variants: Variants) -> NDArray[np.int64]:
        """Candidates below each row (down), of all schedules, with each of some (across): none where it is
        illegal."""
        table, m = rows.table, microbatches_of(self._problem, rows.table)
        legal = asked_once(self._space.count_legal, table.pp, m, table.recompute)
        return self._with_each(rows, pp, variants, legal)

    def _with_each(self, rows: Rows, pp: int, variants: Variants, legal: Any) -> NDArray[np.int64]:
        """The same where `legal` schedules, splits and recomputed layers lie below each row."""
        space, m = self._space, microbatches_of(self._problem, rows.table)
        stages = (pp * variants.vpp).tolist()
        below = np.array([[space.count_splits(n, kind) for n in stages] for kind in range(FULL + 1)])
        per_split = rows.candidates // np.maximum(legal, 1)
        return np.where(
            legal_cells(space, pp, m, variants), below[rows.table.recompute] * per_split[:, None], 0
        )

    def _scheduled_alike(self, rows: Rows, pp: int, variants: Variants) -> Rows:
        """Every row (down) with every schedule of its family (across)."""
        family, m = FAMILIES[rows.table.schedule], microbatches_of(self._problem, rows.table)
        legal = asked_once(self._space.count_legal, rows.table.pp, m, rows.table.recompute, family)
        candidates = self._with_each(rows, pp, variants, legal)
        candidates[family[:, None] != FAMILIES[variants.schedule]] = 0
        space, kind = self._space, rows.table.recompute
        stages = (pp * variants.vpp).tolist()
        ranges = [space.split_range(n) for n in stages]
        split = Split(*(np.array([getattr(r, name) for r in ranges])[None] for name in SPLIT_FIELDS))
        fewest = np.array([[self._fewest_on(n, kind) for n in stages] for kind in range(FULL + 1)])
        block = self._spread(rows, split, recompute_layers=fewest[kind], recompute_most=split.largest)
        block = replace(block, schedule=variants.schedule[None], vpp=variants.vpp[None])
        row, variant, time_s = self._open_cells(rows, block, candidates, "schedule")
        table = rows.table.take(row).replaced(
            schedule=variants.schedule[variant], vpp=variants.vpp[variant],
            recompute_layers=block.recompute_layers[row, variant],
        )  # fmt: skip
        kept = Rows(table, rows.of_grid[row], time_s, candidates[row, variant], rows.traffic.taken(row))
        split = Split(
            *(np.broadcast_to(getattr(split, name), candidates.shape)[row, variant] for name in SPLIT_FIELDS)
        )
        kept, split = self._narrowing.tightened(kept, split, "schedule", pp)
        return self._narrowing.schedules_with_room(kept, split, pp)

    def _spread(self, rows: Rows, split: Split, **changes: Any) -> Block:
        """The blocks of rows, down, to be combined with options, across."""
        block = self._block(rows, split)
        down = {name: getattr(block, name)[:, None] for name in BLOCK_FIELDS}
        return replace(block, split=split, **(down | changes))

    def _open_cells(
        self, rows: Rows, block: Block, candidates: NDArray[np.int64], level: str
    ) -> tuple[Any, Any, Any]:
        """Row, option and bound of the combinations that may matter; the others are counted.

        Combinations without candidates are none.
        """
        problem, lie = self._problem, lie_of(block)
        totals = self._grids.totals_at(rows.of_grid[:, None])
        traffic = rows.traffic.taken(np.arange(len(rows))[:, None])
        time_s = np.maximum(least_s(problem, block, lie, totals, traffic), rows.bound_s[:, None])
        device_bytes = None
        if self._goal.weighs_memory:
            most = replace(block, recompute_layers=np.where(block.recompute == FULL, block.split.largest, 0))
            device_bytes = least_bytes(problem, most, lie, totals)
        row, option = self._open_options(rows, time_s, candidates, level, device_bytes)
        return row, option, time_s[row, option]

    def _split(self, rows: Rows) -> Rows:
        """First and last stages."""
        table, parts = rows.table, [none_of(rows)]
        first, of_each = distinct_rows([table.pp, table.vpp, table.schedule])
        for index, row in enumerate(first.tolist()):
            stages = int(table.pp[row] * table.vpp[row])
            count = len(self._space.splits(stages)["first_stage_layers"])
            for same in alike_rows(rows, of_each == index, count):
                for part in slices(len(same), max(CELLS_AT_A_TIME // max(count, 1), 1)):
                    parts.append(self._split_alike(rows.take(same[part])))
        return Rows.joined(parts)

    def _split_alike(self, rows: Rows) -> Rows:
        """The same for rows of one schedule: every row (down) with every split (across)."""
        space, table = self._space, rows.table
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
        block = self._spread(rows, split, recompute_layers=layers, recompute_most=split.largest)
        block = replace(
            block, schedule=table.schedule[:1, None], vpp=table.vpp[:1, None], pp=table.pp[:1, None]
        )
        row, option, time_s = self._open_cells(rows, block, candidates, "split")
        table = table.take(row).replaced(
            first_stage_layers=ends["first_stage_layers"][option],
            last_stage_layers=ends["last_stage_layers"][option],
            recompute_layers=layers[row, option],
        )
        kept = Rows(table, rows.of_grid[row], time_s, candidates[row, option], rows.traffic.taken(row))
        split = Split(*(getattr(split, name)[0, option] for name in SPLIT_FIELDS))
        return self._narrowing.tightened(kept, split, "split")[0]

    def _split_of(self, table: StrategyTable) -> Split:
        return known_split(
            self._space.layers, table.pp * table.vpp, table.first_stage_layers, table.last_stage_layers
        )

    def _recomputed(self, rows: Rows) -> Rows:
        """Numbers of recomputed layers; fewer than fit are rejected."""
        space, problem = self._space, self._problem
        is_full = rows.table.recompute == FULL
        plain, full = rows.take(~is_full), rows.take(is_full)
        if not len(full):
            return plain
        largest = self._split_of(full.table).largest
        parent, table = expanded(
            full.table, [largest], lambda most: {"recompute_layers": space.recompute_layers(FULL, most)}
        )
        each = asked_once(lambda most: len(space.recompute_layers(FULL, most)), largest)
        candidates = (full.candidates // np.maximum(each, 1))[parent]
        below = Rows(
            table, full.of_grid[parent], full.bound_s[parent], candidates, full.traffic.taken(parent)
        )
        fits = table.recompute_layers >= full.table.recompute_layers[parent]
        self._sift.add(MEMORY, below.of_grid[~fits], candidates[~fits])
        below = below.take(fits)
        block = self._block(below, self._split_of(below.table))
        lie, totals = lie_of(block), self._grids.totals_at(below.of_grid)
        time_s = np.maximum(least_s(problem, block, lie, totals, below.traffic), below.bound_s)
        below = self._sift.sifted(below, "layers", time_s, least_bytes(problem, block, lie, totals))
        return Rows.joined([plain, below])
