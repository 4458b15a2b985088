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
    least_compute_of_any_micro_batch_s,
    least_of_any_micro_batch_s,
)
from shardwise.search.census import Census
from shardwise.search.fates import Ledger
from shardwise.search.goals import Goal
from shardwise.search.space import Degrees, Space, expanded
from shardwise.strategy import StrategyTable

Bound = Callable[[Problem, StrategyTable], Any]
"""Seconds that everything on each grid takes at least, with any micro-batch size up to the row's."""


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

    def opened(self, goal: Goal, ledger: Ledger) -> Listing:
        """The grids that may still matter; the others are cut."""
        keep = goal.may_matter(self.bound_s)
        ledger.add_below("cut_degrees", self.table, ~keep, self.candidates[~keep])
        return self.take(keep)

    def with_micro_batches(self, space: Space) -> tuple[StrategyTable, NDArray[np.int64]]:
        """The grids with every micro-batch size, and how many each row stands for."""
        parent, table = expanded(self.table, [self.table.dp], space.micro_batch_sizes)
        return table, self.weights[parent]


def listed(
    problem: Problem,
    space: Space,
    degrees: Sequence[Degrees],
    goal: Goal,
    *,
    folds: bool,
    cuts: bool = True,
    most: int | None = None,
) -> tuple[Listing, Ledger]:
    """The legal grids with these degrees that may matter to the goal (all legal ones without `cuts`; those
    with the least bounds where no more than `most` are wanted), and what became of the others.

    With `folds`, grids that cost the same are one. Candidates whose schedule is illegal are rejected here
    too. Grids are cut by their computation first, which is soon known: few are left to be told apart.
    """
    shapes, ledger = space.shapes(degrees), Ledger()
    census = Census(problem.limits, space, shapes)
    census.reject(ledger)
    shapes, candidates = shapes.take(census.legal), census.candidates
    bound_s = _bound_s(problem, space, shapes, least_compute_of_any_micro_batch_s)
    if cuts:
        keep = goal.may_matter(bound_s)
        ledger.add_below("cut_degrees", shapes, ~keep, (census.orders * candidates)[~keep])
        shapes, candidates, bound_s = shapes.take(keep), candidates[keep], bound_s[keep]
    shape, table = space.with_orders(shapes)
    weights = np.ones(len(table), dtype=np.int64)
    grids = Listing(table=table, weights=weights, bound_s=bound_s[shape], candidates=candidates[shape])
    if folds and len(grids.table):
        rows, alike = alike_grids(problem, grids.table)
        weights = np.bincount(alike).astype(np.int64)
        grids = grids.take(rows)
        grids = replace(grids, weights=weights, candidates=grids.candidates * weights)
    grids = _bounded(problem, space, grids, goal, len(grids.table) if most is None else most)
    return (grids.opened(goal, ledger) if cuts else grids), ledger


def _bounded(problem: Problem, space: Space, grids: Listing, goal: Goal, most: int) -> Listing:
    """The `most` grids with the least bounds, with communication where they may matter.

    Bounds without communication are lower: what exceeds the `most`-th best by these alone is not among them.
    """
    bound_s = grids.bound_s.copy()
    matters = np.flatnonzero(goal.may_matter(bound_s))
    first, rest = np.split(matters[np.argsort(bound_s[matters], kind="stable")], [most])
    for rows in (first, rest):
        near = rows if rows is first else rows[bound_s[rows] <= bound_s[first].max(initial=0.0)]
        bound_s[near] = _bound_s(problem, space, grids.table.take(near), least_of_any_micro_batch_s)
    order = np.argsort(bound_s, kind="stable")[:most]
    return replace(grids, bound_s=bound_s).take(np.sort(order))


def _bound_s(problem: Problem, space: Space, table: StrategyTable, least_s: Bound) -> NDArray[np.float64]:
    """Seconds that everything on a grid takes at least, whatever its micro-batch size."""
    dps, of_dp = np.unique(table.dp, return_inverse=True)
    most = [space.micro_batch_sizes(int(dp))["micro_batch_size"].max(initial=1) for dp in dps]
    table = table.replaced(micro_batch_size=np.array(most, dtype=np.int64)[of_dp])
    return np.array(least_s(problem, table)) if len(table) else np.zeros(0)
