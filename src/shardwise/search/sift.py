"""What becomes of rows: which fit, which may still matter; all others are counted where they stand."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.cost import Problem, Room
from shardwise.search.fates import Fates
from shardwise.search.goals import Goal
from shardwise.search.rows import Rows
from shardwise.strategy import MEMORY, StrategyTable

LESS = 1.0 - 1e-12
"""Sums of bytes in another order differ in their last digits: blocks are given the benefit of the doubt."""


class Sift:
    """Decides by memory and by what the goal still wants; `fates` counts what is lost.

    With `is_exhaustive` nothing is cut. `without` names what is not used: levels whose bounds are ignored
    (see `fates.LEVELS`), "room", and "memory" (of blocks; strategies that do not fit are never evaluated).
    """

    def __init__(
        self,
        problem: Problem,
        goal: Goal,
        fates: Fates,
        *,
        is_exhaustive: bool,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._problem, self._goal, self.fates = problem, goal, fates
        self.is_exhaustive, self._without = is_exhaustive, without

    def add(self, fate: str, of_grid: Any, candidates: Any) -> None:
        """Counts candidates below grids."""
        self.fates.add(fate, of_grid, candidates)

    def cut(self, level: str, of_grid: Any, candidates: Any) -> None:
        """Counts candidates that a bound cuts."""
        self.fates.add(f"cut_{level}", of_grid, candidates)

    def open(self, level: str, time_s: Any, device_bytes: Any) -> Any:
        """Which rows may still matter that take at least so much."""
        self.fates.bounded += int(np.size(time_s))
        if self.is_exhaustive or level in self._without:
            return np.ones(np.shape(time_s), dtype=bool)
        return self._goal.may_matter(time_s, LESS * device_bytes)

    def open_of_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Any:
        """Which rows may matter among their kind."""
        if self.is_exhaustive:
            return np.ones(len(table), dtype=bool)
        return self._goal.may_matter_of_kind(table, time_s, device_bytes)

    def fits(self, device_bytes: Any) -> Any:
        """Which rows may fit on the device."""
        return (LESS * device_bytes <= self._problem.usable_bytes) | ("memory" in self._without)

    def hosted(self, host_bytes: Any) -> Any:
        """Which rows may fit on the host; where nothing is cut, strategies are asked one by one."""
        return (LESS * host_bytes <= self._problem.host_bytes_per_device) | (
            self.is_exhaustive or "memory" in self._without
        )

    def is_enough(self, room: Room) -> Any:
        """Which rows have room for all layers in time."""
        return room.is_enough | (self.is_exhaustive or "room" in self._without)

    def sifted(self, rows: Rows, level: str, time_s: Any, device_bytes: Any | None = None) -> Rows:
        """The rows that fit and may matter, with their new bounds; the others are counted."""
        rows = rows.replaced(bound_s=time_s)
        if device_bytes is None:
            return self.opened(rows, level, self.open(level, time_s, rows.device_bytes))
        return self._fitting(rows, level, device_bytes, self.fits(device_bytes), True)

    def with_room(self, rows: Rows, level: str, device_bytes: Any, room: Room) -> Rows:
        """The rows that fit and may matter, and whose ranks have room for all layers."""
        fit = self.fits(np.where(room.fits, device_bytes, np.inf))
        return self._fitting(rows, level, device_bytes, fit, self.is_enough(room))

    def _fitting(self, rows: Rows, level: str, device_bytes: Any, fit: Any, matters: Any) -> Rows:
        """The rows that fit and may matter, with their new bytes."""
        rows = rows.replaced(device_bytes=np.maximum(rows.device_bytes, device_bytes))
        keep = matters & self.open(level, rows.bound_s, rows.device_bytes)
        if not np.all(fit):
            lost = rows.take(~fit)
            self.add(MEMORY, lost.of_grid, lost.candidates)
            rows, keep = rows.take(fit), keep[fit]
        return self.opened(rows, level, keep)

    def opened(self, rows: Rows, level: str, keep: Any) -> Rows:
        """The rows under a mask; the others are cut."""
        if np.all(keep):
            return rows
        self.cut(level, rows.of_grid[~keep], rows.candidates[~keep])
        return rows.take(keep)
