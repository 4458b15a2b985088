"""Bound sets of the Pareto frontier: Lagrangian bounds from below, incumbents from above.

`LagrangianBounds` holds weighted sums that no solution is below, and the explored boxes of enumerations.
`IncumbentSet` holds the non-dominated solutions found so far and their local nadir points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from shardwise.pareto import non_dominated
from shardwise.search.pareto.solution import Measure, Solution
from shardwise.ties import ROUNDING

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExploredBox:
    """Proof of one enumeration. Every solution below `box` (2) in time and memory whose weighted sum by
    `weights` (2) is below `limit` is matched by an incumbent."""

    weights: Values
    limit: float
    box: Values


@dataclass(slots=True)
class LagrangianBounds:
    """Lagrangian bounds on weighted sums of (time, memory).

    Bound j has the weights `weights[j]`, of shape (J, 2). No solution has a weighted sum below
    `proven_sums[j]`. Every solution with a sum below `explored_sums[j]` is matched by an incumbent. `shares`
    (J) are the shares of hidden_s in the weight of time. `peaks[j]` (segments) are the multipliers of the
    segments' peaks. `explored` holds proofs that hold in a box only.
    """

    weights: Values = field(default_factory=lambda: np.empty((0, 2)))
    shares: Values = field(default_factory=lambda: np.empty(0))
    explored_sums: Values = field(default_factory=lambda: np.empty(0))
    proven_sums: Values = field(default_factory=lambda: np.empty(0))
    peaks: list[Values] = field(default_factory=list)
    explored: list[ExploredBox] = field(default_factory=list)

    def add(self, weights: Values, shares: Values, peaks: Values, least: Values) -> None:
        """Add bounds that no solution is below. Of bounds with equal weights the highest stays."""
        for own, share, parts, value in zip(weights, shares, peaks, least.tolist(), strict=True):
            alike = np.flatnonzero((self.weights == own).all(axis=1))
            if not len(alike):
                self.weights = np.concatenate([self.weights, own[None]])
                self.shares = np.append(self.shares, share)
                self.explored_sums = np.append(self.explored_sums, value)
                self.proven_sums = np.append(self.proven_sums, value)
                self.peaks.append(parts)
            elif value > self.proven_sums[alike[0]]:
                lower_bound = int(alike[0])
                self.shares[lower_bound], self.proven_sums[lower_bound], self.peaks[lower_bound] = (
                    share,
                    value,
                    parts,
                )
                self.explored_sums[lower_bound] = max(float(self.explored_sums[lower_bound]), value)

    def raise_to(self, lower_bound: int, least: float) -> None:
        """Raise a bound: no solution has a weighted sum below `least`."""
        self.proven_sums[lower_bound] = max(float(self.proven_sums[lower_bound]), least)
        self.explored_sums[lower_bound] = max(float(self.explored_sums[lower_bound]), least)

    def closest(self, nadir_points: Values, count: int) -> npt.NDArray[np.intp]:
        """Up to `count` bounds that weigh both objectives and are closest to nadir points (n, 2), evenly
        spread over their slopes."""
        both = np.flatnonzero(self.weights.all(axis=1))
        if not len(nadir_points) or not len(both):
            return both[:0]
        finite = nadir_points[np.isfinite(nadir_points).all(axis=1)]
        beyond = weighted(self.weights[both], finite) / self.explored_sums[both]
        near = both[np.unique(beyond.argmin(axis=1))] if len(finite) else both
        by_slope = near[np.argsort(self.weights[near, 1] / self.weights[near, 0], kind="stable")]
        picked = np.linspace(0, len(near) - 1, min(count, len(near))).astype(np.intp)
        return np.asarray(by_slope[picked])

    def mark_explored(self, lower_bound: int, limit: float, box: Values) -> None:
        """Record that all solutions with a sum below `limit`, and below `box` (2) in time and memory, are
        matched."""
        if np.isinf(box).all():
            self.explored_sums[lower_bound] = max(float(self.explored_sums[lower_bound]), limit)
        else:
            self.explored.append(ExploredBox(self.weights[lower_bound], limit, box))


def weighted(weights: Values, points: Values) -> Values:
    """Weighted sums of points (n, 2) under weights (J, 2): (n, J). A weight of 0 makes 0 of an infinite
    value."""
    sums = np.zeros((len(points), len(weights)))
    for column in range(2):
        own = weights[:, column]
        is_some = own > 0.0
        sums[:, is_some] += own[is_some][None] * points[:, column : column + 1]
    return sums


def is_open(lower_bounds: LagrangianBounds, nadir_points: Values) -> npt.NDArray[np.bool_]:
    """Which nadir points are open, (n): no bound excludes everything below them, and no enumeration has
    explored it."""
    found = (
        lower_bounds.explored_sums[None] < weighted(lower_bounds.weights, nadir_points) * (1.0 - ROUNDING)
    ).all(axis=1)
    for explored in lower_bounds.explored:
        found &= (nadir_points > explored.box).any(axis=1) | (
            nadir_points @ explored.weights * (1.0 - ROUNDING) > explored.limit
        )
    return np.asarray(found)


@dataclass(slots=True)
class IncumbentSet:
    """Non-dominated solutions by ascending time, each with the number of its chain; `points` (n, 2).

    Solutions above `most_bytes` need no match. They only show between which points weighted sums are useful.
    """

    most_bytes: float = inf
    points: Values = field(default_factory=lambda: np.empty((0, 2)))
    solutions: list[tuple[int, Solution]] = field(default_factory=list)

    def add(self, measured: list[tuple[Measure, tuple[int, Solution]]]) -> None:
        """Add solutions and keep the non-dominated ones. Of equal ones the first stays."""
        points = np.concatenate([self.points, np.array([point for point, _ in measured]).reshape(-1, 2)])
        every = [*self.solutions, *(solution for _, solution in measured)]
        rows_left = non_dominated(points)
        self.points, self.solutions = points[rows_left], [every[row] for row in rows_left.tolist()]

    def nadir_points(self, epsilon: float) -> Values:
        """Local nadir points, (n + 1, 2).

        A solution that fits even if it is a factor 1 + epsilon larger, and that no incumbent matches within
        this factor, is below one of them in both objectives.

        Between two neighbours: the time of the slower one, and the memory of the larger one or the memory
        limit. Before the first: its time. After the last: its memory. Nothing is below that of a point which
        does not fit: it is (0, 0).
        """
        times = np.concatenate([self.points[:, 0], [np.inf]])
        memories = np.concatenate([[np.inf], self.points[:, 1]])
        if isfinite(self.most_bytes):
            # A little above the limit, so that a solution of exactly this size is below it.
            memories[memories > self.most_bytes] = self.most_bytes * (1.0 + 4.0 * ROUNDING)
        nadir_points = np.column_stack([times, memories]) / (1.0 + epsilon)
        nadir_points[:-1][self.points[:, 1] > self.most_bytes] = 0.0
        return nadir_points

    def extremes(self, epsilon: float) -> Values:
        """The nadir points of the least time and of the least memory, (2, 2).

        The first is (0, 0) if the fastest incumbent does not fit. The least memory is searched even if it
        does not fit.
        """
        if not len(self.points):
            return np.full((2, 2), np.inf)
        fastest, smallest = self.points[0], self.points[-1]
        first = [fastest[0], np.inf] if fastest[1] <= self.most_bytes else [0.0, 0.0]
        return np.array([first, [np.inf, smallest[1]]]) / (1.0 + epsilon)

    def thinned(self, epsilon: float) -> IncumbentSet:
        """A small subset of the incumbents that fit which matches each of them within a factor 1 + epsilon.
        If none fits, the one of least memory."""
        fitting = np.flatnonzero(self.points[:, 1] <= self.most_bytes)
        if not len(fitting):
            fitting = np.arange(len(self.points))[-1:]
        rows_left = fitting[representatives(self.points[fitting], epsilon)]
        return IncumbentSet(
            self.most_bytes, self.points[rows_left], [self.solutions[row] for row in rows_left.tolist()]
        )


def representatives(points: Values, epsilon: float) -> npt.NDArray[np.intp]:
    """Rows of points (n, 2), the first column ascending and the second descending, that match all others
    within a factor 1 + epsilon.

    Greedy: the first row, then always the slowest that matches every row it skips.
    """
    if len(points) < 3 or epsilon <= 0.0:
        return np.arange(len(points))
    rows_left = [0]
    last = len(points) - 1
    while rows_left[-1] < last:
        unmatched = np.flatnonzero(
            points[rows_left[-1] + 1 :, 1] * (1.0 + epsilon) < points[rows_left[-1], 1]
        )
        if not len(unmatched):
            rows_left.append(last)
            break
        first = rows_left[-1] + 1 + int(unmatched[0])
        limit_s = points[first, 0] * (1.0 + epsilon)
        rows_left.append(max(first, int(np.searchsorted(points[:, 0], limit_s, side="right")) - 1))
    return np.asarray(rows_left, dtype=np.intp)
