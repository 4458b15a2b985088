"""How many candidates lie below the grids of each choice of (tp, cp, dp, pp), and how many of them are
illegal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.search.fates import DEGREES, FATE, Degrees, Ledger
from shardwise.search.space import Space, Variants
from shardwise.strategy import GRID_RULES, SCHEDULE_RULES, Limits, StrategyTable, first_broken


class Census:
    """Counts below the grids of a table of shapes, which stand for `orders` grids each. `of_shape` says which
    degrees a shape has: as many candidates lie below each grid with the same degrees."""

    def __init__(self, limits: Limits, space: Space, table: StrategyTable) -> None:
        self._limits, self._space = limits, space
        first, self.of_shape = distinct_rows([getattr(table, name) for name in DEGREES])
        self._few = table.take(first)
        self._below, self._orders = space.count_below_grids(self._few), space.count_orders(self._few)
        self._reason = first_broken(table, limits, GRID_RULES)

    @cached_property
    def legal(self) -> NDArray[np.intp]:
        """The shapes that break no rule and have candidates."""
        return np.flatnonzero((self._reason < 0) & (self._below * self._orders > 0)[self.of_shape])

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
        return (self._below - sum(self._illegal.values()))[of_legal]

    @property
    def orders(self) -> NDArray[np.int64]:
        """Grids that each legal shape stands for."""
        return self._orders[self.of_shape[self.legal]]

    def reject(self, ledger: Ledger) -> None:
        """Counts what breaks a rule."""
        rules = len(GRID_RULES) + 1
        broken = self.of_shape * rules + self._reason + 1
        shapes = np.bincount(broken, minlength=len(self._below) * rules).reshape(-1, rules)
        for row, degrees in enumerate(self._degrees):
            orders, below, mine = int(self._orders[row]), int(self._below[row]), ledger.of(degrees)
            for rule, count in zip(GRID_RULES, shapes[row, 1:].tolist(), strict=True):
                mine[FATE[rule.code]] += count * orders * below
            for code, counts in self._illegal.items():
                mine[FATE[code]] += int(shapes[row, 0]) * orders * int(counts[row])

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
