"""How many candidates lie below the grids of each choice of (tp, cp, dp, pp), and how many of them are
illegal or beyond the target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.search.fates import DEGREES, OUTCOME_INDEX, CandidateLedger, Degrees
from shardwise.search.space import Space
from shardwise.search.variants import Variants
from shardwise.strategy import GRID_RULES, SCHEDULE_RULES, TARGET_LIMIT, Limits, StrategyTable, first_broken


class CandidateCounts:
    """Counts below the grids of a table of shapes, which stand for `orders` grids each. `of_shape` says which
    degrees a shape has: as many candidates lie below each grid with the same degrees."""

    def __init__(self, limits: Limits, space: Space, table: StrategyTable) -> None:
        self._limits, self._space = limits, space
        first, self.of_shape = distinct_rows([getattr(table, name) for name in DEGREES])
        self._few = table.take(first)
        self._below, self._orders = space.count_below_grids(self._few), space.count_orders(self._few)
        self._reason = first_broken(table, limits, GRID_RULES)
        self._orders_within = self._count_orders_within(table)

    def _count_orders_within(self, table: StrategyTable) -> NDArray[np.int64]:
        """Axis orders of each shape that are within the limits; of shapes that break a rule all."""
        each = self._orders[self.of_shape]
        if self._space.limits:
            legal = np.flatnonzero(self._reason < 0)
            row, _ = self._space.with_orders(table.take(legal))
            each[legal] = np.bincount(row, minlength=len(legal))
        return each

    @cached_property
    def _below_within(self) -> NDArray[np.int64]:
        """Candidates below a grid of each degrees whose shards are within the limits."""
        ranks = self._few.dp * self._few.cp
        each = self._below // np.maximum(self._space.count_all_shards(ranks), 1)
        return np.asarray(each * self._space.count_shards(ranks))

    @cached_property
    def legal(self) -> NDArray[np.intp]:
        """The shapes that break no rule, are within the limits and have candidates."""
        has_some = (self._below_within > 0)[self.of_shape] & (self._orders_within > 0)
        return np.flatnonzero((self._reason < 0) & has_some)

    @cached_property
    def _illegal(self) -> dict[str, NDArray[np.int64]]:
        """Candidates below a legal grid of each degrees whose schedule breaks a rule, by its code."""
        few, below = self._few, 0 * self._below
        counts = {rule.code: below.copy() for rule in SCHEDULE_RULES}
        states = self._space.count_shards(few.dp * few.cp) * len(self._space.offloads)
        used = np.unique(self.of_shape[self.legal])
        pairs, of_pair = distinct_rows([few.dp[used], few.pp[used]])
        for index, row in enumerate(used[pairs].tolist()):
            same = used[of_pair == index]
            grid = few.take(slice(row, row + 1))
            for code, count in _illegal_schedules(self._space, self._limits, grid).items():
                counts[code][same] = count * states[same]
        return counts

    @property
    def candidates(self) -> NDArray[np.int64]:
        """Candidates with a legal schedule below each grid of each legal shape."""
        of_legal = self.of_shape[self.legal]
        return (self._below_within - sum(self._illegal.values()))[of_legal]

    @property
    def orders(self) -> NDArray[np.int64]:
        """Grids that each legal shape stands for."""
        return self._orders_within[self.legal]

    def reject(self, ledger: CandidateLedger) -> None:
        """Counts what breaks a rule or is beyond a limit of the target."""
        rules = len(GRID_RULES) + 1
        is_legal = self._reason < 0
        within = np.bincount(self.of_shape[is_legal], self._orders_within[is_legal], len(self._below))
        broken = self.of_shape * rules + self._reason + 1
        shapes = np.bincount(broken, minlength=len(self._below) * rules).reshape(-1, rules)
        for row, degrees in enumerate(self._degrees):
            orders, below, mine = int(self._orders[row]), int(self._below[row]), ledger.entry(degrees)
            for rule, count in zip(GRID_RULES, shapes[row, 1:].tolist(), strict=True):
                mine[OUTCOME_INDEX[rule.code]] += count * orders * below
            grids, below_within = int(within[row]), int(self._below_within[row])
            mine[OUTCOME_INDEX[TARGET_LIMIT]] += int(shapes[row, 0]) * orders * below - grids * below_within
            for code, counts in self._illegal.items():
                mine[OUTCOME_INDEX[code]] += grids * int(counts[row])

    @property
    def _degrees(self) -> Iterator[Degrees]:
        few = self._few
        yield from zip(few.tp.tolist(), few.cp.tolist(), few.dp.tolist(), few.pp.tolist(), strict=True)


def _illegal_schedules(space: Space, limits: Limits, grid: StrategyTable) -> dict[str, int]:
    """How many choices of micro-batch size, schedule, split and recomputed layers break each rule first,
    beside the dp and pp of a grid (a table of one row)."""
    counts: dict[str, int] = {}
    pp = int(grid.pp[0])
    sizes = space.micro_batch_sizes(int(grid.dp[0]))["micro_batch_size"]
    variants = space.variants(pp)
    rows = grid.take(np.zeros(len(sizes) * len(variants), dtype=np.intp)).replaced(
        micro_batch_size=np.repeat(sizes, len(variants)),
        schedule=np.tile(variants.schedule, len(sizes)),
        vpp=np.tile(variants.vpp, len(sizes)),
    )
    reason = first_broken(rows, limits, SCHEDULE_RULES)
    for index in np.unique(reason[reason >= 0]).tolist():
        few = Variants(rows.schedule[reason == index], rows.vpp[reason == index])
        code = SCHEDULE_RULES[index].code
        counts[code] = sum(space.count_variants(few, pp, int(kind)) for kind in space.recomputes)
    return counts
