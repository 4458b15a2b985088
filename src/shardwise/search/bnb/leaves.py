"""Leaves of the search: sharding of optimizer states, exact memory, evaluation."""

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
from shardwise.search.bnb.prune import BYTES_FACTOR, Pruner
from shardwise.search.space import Space, expanded
from shardwise.search.step_times import microbatches_of, pipeline_makespan_s, step_times_s
from shardwise.strategy import HOST_MEMORY, MEMORY, StrategyTable

FIRST_NODES, MOST_NODES = 192, 1 << 14
"""Nodes whose optimizer-state shardings are listed in the first round, and in any round at most. Each round
takes four times as many."""

FIRST_LEAVES = 16
"""Strategies evaluated first; the number doubles after each batch."""

ACTIONS_PER_ROUND = 1 << 21
"""Pairs of a stage and a micro-batch evaluated between two updates of the incumbents, at most."""


class Leaves:
    """Evaluates the strategies below nodes in which only the sharding of optimizer states is open.

    `weights` has the number of grids that each of `grids` stands for. `check` is called regularly and may
    raise.
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
        """Takes nodes by increasing bound in rounds, lists their optimizer-state shardings, and evaluates
        those that fit and may improve."""
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
        """Nodes of the next round: `size`, or fewer where their tables of actions are large."""
        few = rows.table.take(order[: 1 << 14])
        pairs = np.cumsum(few.pp * few.vpp * microbatches_of(self._problem, few))
        fitting = int(np.searchsorted(pairs, ACTIONS_PER_ROUND, side="right"))
        return max(fitting if self._pruner.is_exhaustive else min(size, fitting), 1)

    def _evaluate_round(self, rows: SearchNodes) -> None:
        """Checks the memory of nodes, and lists the optimizer-state shardings of those that remain.

        Memory falls with the sharding degree of the optimizer states, so a node has its least memory.
        """
        problem = self._problem
        known = self._pruner.may_improve_kind(
            rows.table, rows.lower_bound_s, BYTES_FACTOR * rows.device_bytes
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
        """Lists the optimizer-state shardings of nodes, estimates memory and time outside the schedule for
        each, and evaluates the schedule of the nodes that may still improve, once for all shardings of a
        node."""
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
        """Lower bound of each node's pipeline makespan, without the time outside the schedule."""
        block = subproblem_of(self._problem, rows.table, NO_SPLIT)
        totals = self._grids.totals_at(rows.of_grid, rows.table.recompute_modules)
        return np.asarray(rows.lower_bound_s - end_s(self._problem, block, totals))

    def _evaluate_leaves(self, table: StrategyTable, of_grid: Any, least_s: Any, device_bytes: Any) -> None:
        """Evaluates strategies by increasing bound, in small batches, until no remaining one may improve."""
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
