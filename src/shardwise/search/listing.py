"""The legal grids of a space, with what bounds them: where a search starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Problem,
    alike_grids,
    any_micro_batch_compute_bound_s,
    any_micro_batch_lower_bound_s,
)
from shardwise.search.census import CandidateCounts
from shardwise.search.fates import CandidateLedger
from shardwise.search.goals import Goal
from shardwise.search.space import Degrees, Space, expanded
from shardwise.strategy import StrategyTable

Bound = Callable[[Problem, StrategyTable], Any]
"""Seconds that everything on each grid takes at least, with any micro-batch size up to the row's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNodes:
    """Legal grids, one for all that are alike, in the order of their bounds: how many are alike, and the
    candidates below them all."""

    table: StrategyTable
    weights: NDArray[np.int64]
    lower_bound_s: NDArray[np.float64]
    candidates: NDArray[np.int64]

    @staticmethod
    def joined(parts: Sequence[RootNodes]) -> RootNodes:
        """The grids of all parts, in the order of their bounds."""
        lower_bound_s = np.concatenate([part.lower_bound_s for part in parts])
        whole = RootNodes(
            table=StrategyTable.joined([part.table for part in parts]),
            weights=np.concatenate([part.weights for part in parts]),
            lower_bound_s=lower_bound_s,
            candidates=np.concatenate([part.candidates for part in parts]),
        )
        return whole.take(np.argsort(lower_bound_s, kind="stable"))

    def take(self, rows: Any) -> RootNodes:
        """These grids."""
        return RootNodes(
            table=self.table.take(rows),
            weights=self.weights[rows],
            lower_bound_s=self.lower_bound_s[rows],
            candidates=self.candidates[rows],
        )

    def pruned(self, goal: Goal, ledger: CandidateLedger) -> RootNodes:
        """The grids that may still matter; the others are cut."""
        keep = goal.may_improve(self.lower_bound_s)
        ledger.add_below("cut_degrees", self.table, ~keep, self.candidates[~keep])
        return self.take(keep)

    def with_micro_batches(self, space: Space) -> tuple[StrategyTable, NDArray[np.int64]]:
        """The grids with every micro-batch size, and how many each row stands for."""
        parent, table = expanded(self.table, [self.table.dp], space.micro_batch_sizes)
        return table, self.weights[parent]


def list_roots(
    problem: Problem,
    space: Space,
    degrees: Sequence[Degrees],
    goal: Goal,
    *,
    merges_symmetric: bool,
    prunes: bool = True,
    most: int | None = None,
) -> tuple[RootNodes, CandidateLedger]:
    """The legal grids with these degrees that may matter to the goal (all legal ones without `prunes`; those
    with the least bounds where no more than `most` are wanted), and what became of the others.

    With `merges_symmetric`, grids that cost the same are one. Candidates whose schedule is illegal are
    rejected here too. Grids are cut by their computation first, which is soon known: few are left to be told
    apart."""
    shapes, ledger = space.shapes(degrees), CandidateLedger()
    counts = CandidateCounts(problem.limits, space, shapes)
    counts.reject(ledger)
    shapes, candidates = shapes.take(counts.legal), counts.candidates
    lower_bound_s = _lower_bounds_s(problem, space, shapes, any_micro_batch_compute_bound_s)
    if prunes:
        keep = goal.may_improve(lower_bound_s)
        ledger.add_below("cut_degrees", shapes, ~keep, (counts.orders * candidates)[~keep])
        shapes, candidates, lower_bound_s = shapes.take(keep), candidates[keep], lower_bound_s[keep]
    shape, table = space.with_orders(shapes)
    weights = np.ones(len(table), dtype=np.int64)
    grids = RootNodes(
        table=table, weights=weights, lower_bound_s=lower_bound_s[shape], candidates=candidates[shape]
    )
    if merges_symmetric and len(grids.table):
        rows, alike = alike_grids(problem, grids.table)
        weights = np.bincount(alike).astype(np.int64)
        grids = grids.take(rows)
        grids = replace(grids, weights=weights, candidates=grids.candidates * weights)
    grids = _bounded(problem, space, grids, goal, len(grids.table) if most is None else most)
    return (grids.pruned(goal, ledger) if prunes else grids), ledger


def _bounded(problem: Problem, space: Space, grids: RootNodes, goal: Goal, most: int) -> RootNodes:
    """The `most` grids with the least bounds, with communication where they may matter.

    Bounds without communication are lower: what exceeds the `most`-th best by these alone is not among them.
    """
    lower_bound_s = grids.lower_bound_s.copy()
    matters = np.flatnonzero(goal.may_improve(lower_bound_s))
    first, rest = np.split(matters[np.argsort(lower_bound_s[matters], kind="stable")], [most])
    for rows in (first, rest):
        contenders = (
            rows if rows is first else rows[lower_bound_s[rows] <= lower_bound_s[first].max(initial=0.0)]
        )
        lower_bound_s[contenders] = _lower_bounds_s(
            problem, space, grids.table.take(contenders), any_micro_batch_lower_bound_s
        )
    order = np.argsort(lower_bound_s, kind="stable")[:most]
    return replace(grids, lower_bound_s=lower_bound_s).take(np.sort(order))


def _lower_bounds_s(
    problem: Problem, space: Space, table: StrategyTable, least_s: Bound
) -> NDArray[np.float64]:
    """Seconds that everything on a grid takes at least, whatever its micro-batch size."""
    dps, of_dp = np.unique(table.dp, return_inverse=True)
    most = [space.micro_batch_sizes(int(dp))["micro_batch_size"].max(initial=1) for dp in dps]
    table = table.replaced(micro_batch_size=np.array(most, dtype=np.int64)[of_dp])
    return np.array(least_s(problem, table)) if len(table) else np.zeros(0)
