"""The legal grids of a space, with what bounds them: where a search starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Problem,
    alike_grids,
    distinct_rows,
    least_compute_of_any_micro_batch_s,
    least_of_any_micro_batch_s,
)
from shardwise.search.fates import Fates, Ledger
from shardwise.search.goals import Goal
from shardwise.search.space import Degrees, Space, Variants, expanded
from shardwise.strategy import GRID_RULES, SCHEDULE_RULES, Limits, StrategyTable, first_broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Legal grids, one for all that are alike, in the order of their bounds: how many are alike, and the
    candidates below them all."""

    table: StrategyTable
    weights: NDArray[np.int64]
    bound_s: NDArray[np.float64]
    candidates: NDArray[np.int64]

    @staticmethod
    def joined(parts: Sequence[Listing]) -> Listing:
        """The grids of all parts, in the order of their bounds."""
        bound_s = np.concatenate([part.bound_s for part in parts])
        whole = Listing(
            table=StrategyTable.joined([part.table for part in parts]),
            weights=np.concatenate([part.weights for part in parts]),
            bound_s=bound_s,
            candidates=np.concatenate([part.candidates for part in parts]),
        )
        return whole.take(np.argsort(bound_s, kind="stable"))

    def take(self, rows: Any) -> Listing:
        """These grids."""
        return Listing(
            table=self.table.take(rows),
            weights=self.weights[rows],
            bound_s=self.bound_s[rows],
            candidates=self.candidates[rows],
        )

    def with_micro_batches(self, space: Space) -> tuple[StrategyTable, NDArray[np.int64]]:
        """The grids with every micro-batch size, and how many each row stands for."""
        parent, table = expanded(self.table, [self.table.dp], space.micro_batch_sizes)
        return table, self.weights[parent]


def listed(
    problem: Problem, space: Space, degrees: Sequence[Degrees], goal: Goal, *, folds: bool
) -> tuple[Listing, Ledger]:
    """The legal grids with these degrees and what became of the others; bounds are sharpest where grids may
    matter to the goal.

    With `folds`, grids that cost the same are one. Candidates whose schedule is illegal are rejected here
    too.
    """
    table, ledger = space.grids(degrees), Ledger()
    candidates = space.count_below_grids(table)
    reason = first_broken(table, problem.limits, GRID_RULES)
    fates = Fates.of(len(table))
    for index in np.unique(reason[reason >= 0]).tolist():
        rows = np.flatnonzero(reason == index)
        fates.add(GRID_RULES[index].code, rows, candidates[rows])
    legal = np.flatnonzero((reason < 0) & (candidates > 0))
    _reject_schedules(problem.limits, space, table, legal, candidates, fates)
    ledger.add(table, fates)
    table, candidates = table.take(legal), candidates[legal]
    weights = np.ones(len(table), dtype=np.int64)
    if len(table) and folds:
        rows, alike = alike_grids(problem, table)
        weights = np.bincount(alike).astype(np.int64)
        table, candidates = table.take(rows), candidates[rows] * weights
    bound_s = _bound_s(problem, space, table, goal) if len(table) else np.zeros(0)
    return Listing(table=table, weights=weights, bound_s=bound_s, candidates=candidates), ledger


def _reject_schedules(
    limits: Limits,
    space: Space,
    table: StrategyTable,
    legal: NDArray[np.intp],
    candidates: NDArray[np.int64],
    fates: Fates,
) -> None:
    """Of the candidates below the legal grids, moves those whose schedule is illegal to their fates."""
    states = space.count_shards(table.dp * table.cp) * len(space.offloads)
    pairs, of_pair = distinct_rows([table.dp[legal], table.pp[legal]])
    for index in range(len(pairs)):
        rows = legal[of_pair == index]
        for code, count in illegal_schedules(space, limits, table.take(rows[:1])).items():
            fates.add(code, rows, count * states[rows])
            candidates[rows] -= count * states[rows]


def _bound_s(problem: Problem, space: Space, table: StrategyTable, goal: Goal) -> NDArray[np.float64]:
    """Seconds that everything on a grid takes at least, whatever its micro-batch size; without communication
    where that is enough."""
    dps, of_dp = np.unique(table.dp, return_inverse=True)
    most = [space.micro_batch_sizes(int(dp))["micro_batch_size"].max(initial=1) for dp in dps]
    table = table.replaced(micro_batch_size=np.array(most)[of_dp])
    bound_s = np.array(least_compute_of_any_micro_batch_s(problem, table))
    matters = goal.may_matter(bound_s)
    bound_s[matters] = least_of_any_micro_batch_s(problem, table.take(matters))
    return bound_s


def illegal_schedules(space: Space, limits: Limits, grid: StrategyTable) -> dict[str, int]:
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
