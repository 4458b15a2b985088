"""What is known of a frontier from outside (lines that no solution is below) and inside (solutions found).

Solutions found so far, of which none is better than another in both objectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from shardwise.pareto import non_dominated
from shardwise.search.pareto.solution import Measure, Solution

Values = npt.NDArray[np.float64]

SLACK = 1e-11
"""Rounding of sums added in different orders, relative: a bound this close above a corner does not cut it."""


@dataclass(frozen=True, slots=True, eq=False)
class ExploredBox:
    """What a look has seen: every solution that takes less than `box` (2) of both, and weighs less than
    `limit` by `weights` (2), is matched by one that was found."""

    weights: Values
    limit: float
    box: Values


@dataclass(slots=True)
class LagrangianBounds:
    """Every solution with weights @ (time, memory) below `least` is matched by one that was found; none at
    all is below `proven_sums`.

    Weights (J, 2), least and drawn (J). `shares` (J) are the share of hidden_s in time's weight with which
    the line was drawn, `peaks` (J, links) the parts of the peak's. `explored` is what was seen of some part.
    """

    weights: Values = field(default_factory=lambda: np.empty((0, 2)))
    shares: Values = field(default_factory=lambda: np.empty(0))
    explored_sums: Values = field(default_factory=lambda: np.empty(0))
    proven_sums: Values = field(default_factory=lambda: np.empty(0))
    peaks: list[Values] = field(default_factory=list)
    explored: list[ExploredBox] = field(default_factory=list)

    def add(self, weights: Values, shares: Values, peaks: Values, least: Values) -> None:
        """Lines as they are drawn: what no solution at all is below. Of like weights the highest stays."""
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
        """No solution at all weighs less by a line than `least`."""
        self.proven_sums[lower_bound] = max(float(self.proven_sums[lower_bound]), least)
        self.explored_sums[lower_bound] = max(float(self.explored_sums[lower_bound]), least)

    def closest(self, nadir_points: Values, count: int) -> npt.NDArray[np.intp]:
        """The lines of both objectives that are closest to corners (n, 2), at most so many of them, evenly
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
        """All solutions below `limit`, and below `box` (2) in time and memory, are matched now."""
        if np.isinf(box).all():
            self.explored_sums[lower_bound] = max(float(self.explored_sums[lower_bound]), limit)
        else:
            self.explored.append(ExploredBox(self.weights[lower_bound], limit, box))


def weighted(weights: Values, points: Values) -> Values:
    """weights (J, 2) of points (n, 2): (n, J); a weight of nothing makes nothing of the infinite."""
    sums = np.zeros((len(points), len(weights)))
    for column in range(2):
        own = weights[:, column]
        is_some = own > 0.0
        sums[:, is_some] += own[is_some][None] * points[:, column : column + 1]
    return sums


def is_open(lower_bounds: LagrangianBounds, nadir_points: Values) -> npt.NDArray[np.bool_]:
    """Which corners have something below them that no line forbids, and no look has seen, (n)."""
    found = (
        lower_bounds.explored_sums[None] < weighted(lower_bounds.weights, nadir_points) * (1.0 - SLACK)
    ).all(axis=1)
    for explored in lower_bounds.explored:
        found &= (nadir_points > explored.box).any(axis=1) | (
            nadir_points @ explored.weights * (1.0 - SLACK) > explored.limit
        )
    return np.asarray(found)


@dataclass(slots=True)
class IncumbentSet:
    """Solutions, each with the number of its chain, by time; `points` (n, 2). Those that take more than
    `most_bytes` only tell where lines are worth drawing: nothing has to match what takes as much."""

    most_bytes: float = inf
    points: Values = field(default_factory=lambda: np.empty((0, 2)))
    solutions: list[tuple[int, Solution]] = field(default_factory=list)

    def add(self, measured: list[tuple[Measure, tuple[int, Solution]]]) -> None:
        """Take in more of them; of equal ones the first stays."""
        points = np.concatenate([self.points, np.array([point for point, _ in measured]).reshape(-1, 2)])
        every = [*self.solutions, *(solution for _, solution in measured)]
        rows_left = non_dominated(points)
        self.points, self.solutions = points[rows_left], [every[row] for row in rows_left.tolist()]

    def nadir_points(self, epsilon: float) -> Values:
        """(n + 1, 2): whatever fits by a factor 1 + epsilon, and no point that fits matches within it, is
        below one of these in both. Nothing is below that of a point which does not fit: (0, 0).

        Between two neighbours: less time than the slower, less memory than the larger, or than what fits;
        before the first and after the last: less than its time, or its memory.
        """
        times = np.concatenate([self.points[:, 0], [np.inf]])
        memories = np.concatenate([[np.inf], self.points[:, 1]])
        if isfinite(self.most_bytes):
            # A little above it, so that what takes just as much is below that.
            memories[memories > self.most_bytes] = self.most_bytes * (1.0 + 4.0 * SLACK)
        nadir_points = np.column_stack([times, memories]) / (1.0 + epsilon)
        nadir_points[:-1][self.points[:, 1] > self.most_bytes] = 0.0
        return nadir_points

    def extremes(self, epsilon: float) -> Values:
        """The corners of less than the least time, and of less than the least memory, (2, 2): (0, 0) where
        the fastest does not fit. The least memory matters even where that does not."""
        if not len(self.points):
            return np.full((2, 2), np.inf)
        fastest, smallest = self.points[0], self.points[-1]
        first = [fastest[0], np.inf] if fastest[1] <= self.most_bytes else [0.0, 0.0]
        return np.array([first, [np.inf, smallest[1]]]) / (1.0 + epsilon)

    def thinned(self, epsilon: float) -> IncumbentSet:
        """As few of those that fit as still match each within a factor 1 + epsilon: the fastest, and from
        there always the slowest that matches all it passes by. Where none fits, the smallest."""
        fitting = np.flatnonzero(self.points[:, 1] <= self.most_bytes)
        if not len(fitting):
            fitting = np.arange(len(self.points))[-1:]
        rows_left = fitting[representatives(self.points[fitting], epsilon)]
        return IncumbentSet(
            self.most_bytes, self.points[rows_left], [self.solutions[row] for row in rows_left.tolist()]
        )


def representatives(points: Values, epsilon: float) -> npt.NDArray[np.intp]:
    """Rows of points (n, 2), the first ascending and the second descending, such that each point is matched
    within a factor 1 + epsilon by one of them: the first, and from there always the slowest that matches all
    it passes by."""
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
