"""From grids down to evaluated strategies: one part of the search.

    grids -> what is kept -> families of schedules -> what is sharded -> schedules -> splits
          -> recomputed layers -> states -> evaluate

On every level what cannot fit is rejected, and what cannot matter any more is cut, with everything below it;
the rest is divided further.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Grids, Problem, priced_grids
from shardwise.search.fates import Fates
from shardwise.search.goals import Goal
from shardwise.search.leaves import Leaves
from shardwise.search.lower_levels import LowerLevels
from shardwise.search.rows import Rows
from shardwise.search.sift import Sift
from shardwise.search.space import Space
from shardwise.search.upper_levels import UpperLevels
from shardwise.strategy import StrategyTable

FIRST_PARTS = (512, 2048, 4096, 1 << 14, 2048, 1 << 14)
"""Rows of each level that are divided first, before anything is found."""

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

    def run(self) -> None:
        """Searches; afterwards every candidate below the grids is counted in `fates`."""
        if len(self._table):
            self._descend(self._upper.micro_batches(self._upper.legal()), 0)

    @cached_property
    def _grids(self) -> Grids:
        return priced_grids(self._problem, self._table)

    @cached_property
    def _leaves(self) -> Leaves:
        parts = (self._problem, self._space, self._goal, self._grids, self._sift, self._weights)
        return Leaves(*parts, self._check)

    @cached_property
    def _upper(self) -> UpperLevels:
        return UpperLevels(self._problem, self._space, self._goal, self._grids, self._sift, self._weights)

    @cached_property
    def _levels(self) -> tuple[tuple[str, Callable[[Rows], Rows]], ...]:
        """How rows of each level are divided: the level's name, and the next level's rows."""
        upper = self._upper
        lower = LowerLevels(self._problem, self._space, self._goal, self._grids, self._sift, self._weights)
        return (
            ("micro_batch", upper.kept),
            ("kept", upper.families),
            ("family", upper.sharded),
            ("sharded", lower.scheduled),
            ("schedule", lower.split),
            ("split", lower.recomputed),
        )

    def _descend(self, rows: Rows, depth: int) -> None:
        """Goes on with rows of a level by increasing bound, a growing part at a time: what is found below the
        first of them cuts the others."""
        if depth == len(self._levels):
            self._leaves.evaluate(rows)
            return
        name, divided = self._levels[depth]
        order, start, size = self._goal.order(rows.bound_s, rows.device_bytes), 0, FIRST_PARTS[depth]
        while start < len(order):
            self._check()
            if self._goal.found:
                size = max(size, LARGE_PART)
            part = rows.take(order[start : start + size])
            part = self._sift.opened(part, name, self._sift.open(name, part.bound_s, part.device_bytes))
            if len(part):
                self._descend(divided(part), depth + 1)
            start, size = start + size, PART_GROWTH * size
