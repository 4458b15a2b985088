"""What is known of a frontier from outside (lines that no solution is below) and inside (solutions found)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
