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

from shardwise.cost import Grids, Problem, grids_of
from shardwise.search.fates import OutcomeCounts
from shardwise.search.goals import Goal
from shardwise.search.leaves import Leaves
from shardwise.search.lower_levels import FineBranching
from shardwise.search.rows import SearchNodes
from shardwise.search.sift import Pruner
from shardwise.search.space import Space
from shardwise.search.upper_levels import CoarseBranching
from shardwise.strategy import StrategyTable

FIRST_BATCHES = (512, 2048, 4096, 1 << 14, 2048, 1 << 14)
"""Rows of each level that are divided first, before anything is found."""

LARGE_BATCH, BATCH_GROWTH = 1 << 14, 8
"""Rows that are divided first once something is found, and how many times more in each further part."""


class SubtreeSearch:
    """Searches everything below some grids (with their micro-batch sizes).

    `weights` says how many grids each row stands for. What is found goes to `goal`; `outcomes` says
    afterwards what became of the candidates. `without` names bounds that are not used; `check` is called now
    and then, and may raise."""

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
        """Searches; afterwards every candidate below the grids is counted in `outcomes`."""
        if len(self._table):
            self._descend(self._coarse.bound_micro_batches(self._coarse.root_nodes()), 0)

    @cached_property
    def _grids(self) -> Grids:
        return grids_of(self._problem, self._table)

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
    def _levels(self) -> tuple[tuple[str, Callable[[SearchNodes], SearchNodes]], ...]:
        """How rows of each level are divided: the level's name, and the next level's rows."""
        coarse = self._coarse
        fine = FineBranching(self._problem, self._space, self._goal, self._grids, self._pruner, self._weights)
        return (
            ("micro_batch", coarse.branch_recompute),
            ("kept", coarse.branch_family),
            ("family", coarse.branch_sharding),
            ("sharded", fine.branch_schedule),
            ("schedule", fine.branch_split),
            ("split", fine.branch_recompute_layers),
        )

    def _descend(self, nodes: SearchNodes, depth: int) -> None:
        """Goes on with rows of a level by increasing bound, a growing part at a time: what is found below the
        first of them cuts the others."""
        if depth == len(self._levels):
            self._leaves.evaluate(nodes)
            return
        name, branch = self._levels[depth]
        order, start, size = (
            self._goal.order(nodes.lower_bound_s, nodes.device_bytes),
            0,
            FIRST_BATCHES[depth],
        )
        while start < len(order):
            self._check()
            if self._goal.incumbents:
                size = max(size, LARGE_BATCH)
            batch = nodes.take(order[start : start + size])
            batch = self._pruner.pruned_to(
                batch, name, self._pruner.may_improve(name, batch.lower_bound_s, batch.device_bytes)
            )
            if len(batch):
                self._descend(branch(batch), depth + 1)
            start, size = start + size, BATCH_GROWTH * size
