"""Solutions found so far, of which none is better than another in both objectives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwise.frontier import reduce
from shardwise.search.tracking.solution import Measure, Solution

Values = npt.NDArray[np.float64]


@dataclass(slots=True)
class Found:
    """Solutions, each with the number of its chain, by time; `points` (n, 2)."""

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

    def thinned(self, epsilon: float) -> Found:
        """As few of them as still match each within a factor 1 + epsilon: the fastest, and from there always
        the slowest that matches all it passes by."""
        if not len(self.points) or epsilon <= 0.0:
            return self
        kept = [0]
        last = len(self.points) - 1
        while kept[-1] < last:
            # The next may be as slow as what it has to match allows: the first point that the last kept one
            # does not match in memory must be matched in time.
            rest = np.arange(kept[-1] + 1, last + 1)
            memories = self.points[rest, 1] * (1.0 + epsilon)
            is_unmatched = self.points[kept[-1], 1] > memories
            if not is_unmatched.any():
                kept.append(last)
                break
            first = int(rest[int(np.argmax(is_unmatched))])
            slowest = int(np.searchsorted(self.points[:, 0], self.points[first, 0] * (1.0 + epsilon), side="right")) - 1
            kept.append(max(first, min(slowest, last)))
        return Found(self.points[kept], [self.solutions[row] for row in kept])
