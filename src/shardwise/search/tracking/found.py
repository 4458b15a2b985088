"""Solutions found so far, of which none is better than another in both objectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from shardwise.frontier import non_dominated
from shardwise.search.tracking.lines import SLACK
from shardwise.search.tracking.solution import Measure, Solution

Values = npt.NDArray[np.float64]


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
