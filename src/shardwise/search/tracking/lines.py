"""What is known of a frontier from outside (lines that no solution is below) and inside (solutions found)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwise.frontier import reduce
from shardwise.search.tracking.solution import Measure, Solution

Values = npt.NDArray[np.float64]

SLACK = 1e-11
"""Rounding of sums added in different orders, relative: a bound this close above a corner does not cut it."""


@dataclass(slots=True)
class Lines:
    """No solution has weights @ (time, memory) below `least`. Weights (J, 2), least (J)."""

    weights: Values = field(default_factory=lambda: np.empty((0, 2)))
    least: Values = field(default_factory=lambda: np.empty(0))

    def add(self, weights: Values, least: Values) -> None:
        self.weights = np.concatenate([self.weights, weights])
        self.least = np.concatenate([self.least, least])


@dataclass(slots=True)
class Found:
    """Solutions, each with the number of its chain, of which none is better than another in both, by time;
    `points` (n, 2)."""

    points: Values = field(default_factory=lambda: np.empty((0, 2)))
    solutions: list[tuple[int, Solution]] = field(default_factory=list)

    def add(self, measured: list[tuple[Measure, tuple[int, Solution]]]) -> None:
        """Take in more of them; of equal ones the first stays."""
        points = np.concatenate([self.points, np.array([point for point, _ in measured]).reshape(-1, 2)])
        every = [*self.solutions, *(solution for _, solution in measured)]
        kept = reduce(points)
        self.points, self.solutions = points[kept], [every[row] for row in kept.tolist()]

    def corners(self, epsilon: float) -> Values:
        """(n + 1, 2): whatever no found point matches within a factor 1 + epsilon is below one of these in
        both.

        Between two neighbours: less time than the slower, less memory than the larger; before the first and
        after the last: less than its time, or its memory.
        """
        times = np.concatenate([self.points[:, 0], [np.inf]])
        memories = np.concatenate([[np.inf], self.points[:, 1]])
        return np.column_stack([times, memories]) / (1.0 + epsilon)


def weighted(weights: Values, points: Values) -> Values:
    """weights (J, 2) of points (n, 2): (n, J); a weight of nothing makes nothing of the infinite."""
    sums = np.zeros((len(points), len(weights)))
    for column in range(2):
        own = weights[:, column]
        is_some = own > 0.0
        sums[:, is_some] += own[is_some][None] * points[:, column : column + 1]
    return sums


def is_open(lines: Lines, corners: Values) -> npt.NDArray[np.bool_]:
    """Which corners have something below them that no line forbids, (n)."""
    return np.asarray((lines.least[None] < weighted(lines.weights, corners) * (1.0 - SLACK)).all(axis=1))


def may_matter(bounds: Values, corner_sums: Values) -> npt.NDArray[np.bool_]:
    """Which rows of bounds (n, J) may lead to a solution below some corner, of sums (corners, J): (n)."""
    limits = corner_sums * (1.0 + SLACK)
    is_alive = np.zeros(len(bounds), dtype=bool)
    rows = np.flatnonzero((bounds < limits.max(axis=0, initial=-np.inf)).all(axis=1))
    for limit in limits:
        if not len(rows):
            break
        tightest = np.argsort(limit)
        hits = rows[(bounds[rows][:, tightest] < limit[tightest]).all(axis=1)]
        is_alive[hits] = True
        rows = rows[~is_alive[rows]]
    return is_alive
