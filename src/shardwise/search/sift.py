"""What becomes of rows: which fit, which may still matter; all others are counted where they stand."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.cost import LayerCapacity, Problem
from shardwise.search.fates import OutcomeCounts
from shardwise.search.goals import Goal
from shardwise.search.rows import SearchNodes
from shardwise.strategy import MEMORY, StrategyTable

ROUNDING_SLACK = 1.0 - 1e-12
"""Sums of bytes in another order differ in their last digits: blocks are given the benefit of the doubt."""


class Pruner:
    """Decides by memory and by what the goal still wants; `outcomes` counts what is lost.

    With `is_exhaustive` nothing is cut. `without` names what is not used: levels whose bounds are ignored
    (see `outcomes.LEVELS`), "room", and "memory" (of blocks; strategies that do not fit are never evaluated).
    """

    def __init__(
        self,
        problem: Problem,
        goal: Goal,
        outcomes: OutcomeCounts,
        *,
        is_exhaustive: bool,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._problem, self._goal, self.outcomes = problem, goal, outcomes
        self.is_exhaustive, self._without = is_exhaustive, without

    def add(self, outcome: str, of_grid: Any, candidates: Any) -> None:
        """Counts candidates below grids."""
        self.outcomes.add(outcome, of_grid, candidates)

    def prune(self, level: str, of_grid: Any, candidates: Any) -> None:
        """Counts candidates that a bound cuts."""
        self.outcomes.add(f"cut_{level}", of_grid, candidates)

    def may_improve(self, level: str, time_s: Any, device_bytes: Any) -> Any:
        """Which rows may still matter that take at least so much."""
        self.outcomes.bounded_nodes += int(np.size(time_s))
        if self.is_exhaustive or level in self._without:
            return np.ones(np.shape(time_s), dtype=bool)
        return self._goal.may_improve(time_s, ROUNDING_SLACK * device_bytes)

    def may_improve_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Any:
        """Which rows may matter among their kind."""
        if self.is_exhaustive:
            return np.ones(len(table), dtype=bool)
        return self._goal.may_improve_kind(table, time_s, device_bytes)

    def fits(self, device_bytes: Any) -> Any:
        """Which rows may fit on the device."""
        return (ROUNDING_SLACK * device_bytes <= self._problem.usable_bytes) | ("memory" in self._without)

    def fits_host(self, host_bytes: Any) -> Any:
        """Which rows may fit on the host; where nothing is cut, strategies are asked one by one."""
        return (ROUNDING_SLACK * host_bytes <= self._problem.host_bytes_per_device) | (
            self.is_exhaustive or "memory" in self._without
        )

    def has_capacity(self, capacity: LayerCapacity) -> Any:
        """Which rows have room for all layers in time."""
        return capacity.is_enough | (self.is_exhaustive or "room" in self._without)

    def pruned(
        self, nodes: SearchNodes, level: str, time_s: Any, device_bytes: Any | None = None
    ) -> SearchNodes:
        """The rows that fit and may matter, with their new bounds; the others are counted."""
        nodes = nodes.replaced(lower_bound_s=time_s)
        if device_bytes is None:
            return self.pruned_to(nodes, level, self.may_improve(level, time_s, nodes.device_bytes))
        return self._pruned_by_memory(nodes, level, device_bytes, self.fits(device_bytes), True)

    def pruned_by_capacity(
        self, nodes: SearchNodes, level: str, device_bytes: Any, capacity: LayerCapacity
    ) -> SearchNodes:
        """The rows that fit and may matter, and whose ranks have room for all layers."""
        fit = self.fits(np.where(capacity.fits, device_bytes, np.inf))
        return self._pruned_by_memory(nodes, level, device_bytes, fit, self.has_capacity(capacity))

    def _pruned_by_memory(
        self, nodes: SearchNodes, level: str, device_bytes: Any, fit: Any, matters: Any
    ) -> SearchNodes:
        """The rows that fit and may matter, with their new bytes."""
        nodes = nodes.replaced(device_bytes=np.maximum(nodes.device_bytes, device_bytes))
        keep = matters & self.may_improve(level, nodes.lower_bound_s, nodes.device_bytes)
        if not np.all(fit):
            lost = nodes.take(~fit)
            self.add(MEMORY, lost.of_grid, lost.candidates)
            nodes, keep = nodes.take(fit), keep[fit]
        return self.pruned_to(nodes, level, keep)

    def pruned_to(self, nodes: SearchNodes, level: str, keep: Any) -> SearchNodes:
        """The rows under a mask; the others are cut."""
        if np.all(keep):
            return nodes
        self.prune(level, nodes.of_grid[~keep], nodes.candidates[~keep])
        return nodes.take(keep)
