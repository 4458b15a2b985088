"""Leaves of the search: optimizer states, exact memory, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Grids,
    Problem,
    costs_of_peak_stages,
    end_s,
    outside_schedule_s,
    peaks_of,
    subproblem_of,
)
from shardwise.search.bnb.incumbent import Goal
from shardwise.search.bnb.ledger import SIMULATED
from shardwise.search.bnb.nodes import NO_SPLIT, SearchNodes
from shardwise.search.bnb.prune import ROUNDING_SLACK, Pruner
from shardwise.search.space import Space, expanded
from shardwise.search.step_times import microbatches_of, pipeline_makespan_s, step_times_s
from shardwise.strategy import HOST_MEMORY, MEMORY, StrategyTable

FIRST_NODES, MOST_NODES = 192, 1 << 14
"""Rows whose states are listed first and at most; every further round takes four times as many."""

FIRST_LEAVES = 16
"""Strategies evaluated first; then twice as many."""

ACTIONS_PER_ROUND = 1 << 21
"""Stage-microbatch pairs evaluated between two looks at the goal, at most."""


class Leaves:
    """Evaluates what lies below rows that are known but for their optimizer states.

    `weights` says how many grids each of `grids` stands for; `check` is called now and then, and may raise.
    """

    def __init__(
        self,
        problem: Problem,
        space: Space,
        goal: Goal,
        grids: Grids,
        pruner: Pruner,
        weights: NDArray[np.int64],
        check: Callable[[], None],
    ) -> None:
        self._problem, self._space, self._goal, self._pruner = problem, space, goal, pruner
        self._weights, self._grids, self._check = weights, grids, check

    def evaluate(self, rows: SearchNodes) -> None:
        """Takes rows by increasing bound, a round at a time, lists their optimizer states and evaluates what
        fits and may matter."""
        order, size = self._goal.order(rows.lower_bound_s, rows.device_bytes), FIRST_NODES
        while len(order):
            self._check()
            count = self._round_size(rows, order, size)
            self._evaluate_round(rows.take(order[:count]))
            order, size = order[count:], min(4 * size, MOST_NODES)
            if not self._pruner.is_exhaustive and len(order):
                may_improve_rows = self._pruner.may_improve(
                    "layers", rows.lower_bound_s[order], rows.device_bytes[order]
                )
                lost = rows.take(order[~may_improve_rows])
                self._pruner.prune("layers", lost.of_grid, lost.candidates)
                order = order[may_improve_rows]

    def _round_size(self, rows: SearchNodes, order: Any, size: int) -> int:
        """Rows of the next round: `size`, or fewer where their tables are large."""
        few = rows.table.take(order[: 1 << 14])
        pairs = np.cumsum(few.pp * few.vpp * microbatches_of(self._problem, few))
        fitting = int(np.searchsorted(pairs, ACTIONS_PER_ROUND, side="right"))
        return max(fitting if self._pruner.is_exhaustive else min(size, fitting), 1)

    def _evaluate_round(self, rows: SearchNodes) -> None:
        """Evaluates first what the states do not change, then the strategies that are left.

        Memory falls with the degree of the optimizer's states, so a row stands at its least.
        """
        problem = self._problem
        known = self._pruner.may_improve_kind(
            rows.table, rows.lower_bound_s, ROUNDING_SLACK * rows.device_bytes
        )
        rows = self._pruner.pruned_to(rows, "layers", known)
        if not len(rows):
            return
        grids = self._grids
        least = peaks_of(
            problem, rows.table, costs_of_peak_stages(problem, rows.table, grids.costs_of(rows.of_grid))
        )
        fits_host = self._pruner.fits_host(least.host_bytes)
        fits = self._pruner.fits(least.device_bytes)
        lost = rows.take(fits & ~fits_host)
        self._pruner.add(HOST_MEMORY, lost.of_grid, lost.candidates)
        rows, device_bytes = rows.take(fits_host | ~fits), least.device_bytes[fits_host | ~fits]
        rows = self._pruner.pruned(rows, "layers", rows.lower_bound_s, device_bytes)
        if len(rows):
            self._evaluate_states(rows)

    def _evaluate_states(self, rows: SearchNodes) -> None:
        """Lists the optimizer states of rows, prices what they change, and evaluates the schedules of the
        rows that may still matter."""
        problem, space = self._problem, self._space
        keys = [rows.table.dp * rows.table.cp, rows.table.param_shard, rows.table.grad_shard]
        parent, table = expanded(rows.table, keys, space.states)
        of_grid, weights = rows.of_grid[parent], self._weights[rows.of_grid[parent]]
        price = costs_of_peak_stages(problem, table, self._grids.costs_of(of_grid))
        peaks = peaks_of(problem, table, price)
        full = peaks.device_bytes > problem.usable_bytes
        host_full = ~full & (peaks.host_bytes > problem.host_bytes_per_device)
        self._pruner.add(MEMORY, of_grid[full], weights[full])
        self._pruner.add(HOST_MEMORY, of_grid[host_full], weights[host_full])
        fits = np.flatnonzero(~(full | host_full))
        if not len(fits):
            return
        parent, table, device_bytes = parent[fits], table.take(fits), peaks.device_bytes[fits]
        outside_s = outside_schedule_s(problem, table, price.rows(fits))
        matters = self._pruner.may_improve_kind(
            table, self._pipeline_bounds_s(rows)[parent] + outside_s, device_bytes
        )
        self._pruner.prune("states", of_grid[fits[~matters]], weights[fits[~matters]])
        if not matters.any():
            return
        fits, parent, table = fits[matters], parent[matters], table.take(matters)
        used, of_used = np.unique(parent, return_inverse=True)
        few = rows.take(used)
        makespans_s = pipeline_makespan_s(problem, few.table, self._grids.costs_of(few.of_grid))
        least_s = makespans_s[of_used] + outside_s[matters]
        self._evaluate_leaves(table, of_grid[fits], least_s, device_bytes[matters])

    def _pipeline_bounds_s(self, rows: SearchNodes) -> NDArray[np.float64]:
        """What the schedules of rows take at least, without what lies around them."""
        block = subproblem_of(self._problem, rows.table, NO_SPLIT)
        totals = self._grids.totals_at(rows.of_grid)
        return np.asarray(rows.lower_bound_s - end_s(self._problem, block, totals))

    def _evaluate_leaves(self, table: StrategyTable, of_grid: Any, least_s: Any, device_bytes: Any) -> None:
        """Evaluates strategies by increasing bound, a few at a time, until none that is left may matter."""
        order, size = self._goal.order(least_s, device_bytes), FIRST_LEAVES
        weights = self._weights[of_grid]
        while len(order):
            matters = self._pruner.may_improve_kind(table.take(order), least_s[order], device_bytes[order])
            lost, order = order[~matters], order[matters]
            self._pruner.prune("states", of_grid[lost], weights[lost])
            few, order = order[:size], order[size:]
            if len(few):
                rows = table.take(few)
                grids = self._grids.costs_of(of_grid[few])
                self._goal.offer(rows, step_times_s(self._problem, rows, grids), device_bytes[few])
                self._pruner.add(SIMULATED, of_grid[few], np.ones(len(few), dtype=np.int64))
                self._pruner.prune("states", of_grid[few], weights[few] - 1)
            size = 2 * size if not self._pruner.is_exhaustive else len(order)
