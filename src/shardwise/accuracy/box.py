"""Least squares of numbers that have ranges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SLACK = 1e-12
"""A pull across a bound counts from this share of the largest of the right-hand side."""


def bounded_least_squares(matrix: Floats, right: Floats, low: Floats, high: Floats) -> Floats:
    """The x between `low` and `high`, (n,) each, at which x'Mx / 2 - r'x is least.

    `matrix` M (n, n) is positive definite, of normal equations for instance; `right` is r. By active sets:
    what would leave its range on the way to the solution is held at its bound and the others are solved for
    anew; what pulls back from its bound is let go, the strongest first. Every solve lowers the sum, so no set
    comes twice (Stark and Parker 1995, bounded-variable least squares).
    """
    found: Floats = np.clip(0.0, low, high)
    active = low >= high
    slack = SLACK * max(float(np.abs(right).max(initial=0.0)), 1e-300)
    while True:
        active = _solve_free(matrix, right, low, high, found, active)
        downhill = right - matrix @ found
        inward = np.where(found <= low, downhill, -downhill)
        multipliers = np.where(active & (low < high), inward, -np.inf)
        if not len(multipliers) or multipliers.max() <= slack:
            return found
        active[int(multipliers.argmax())] = False


def _solve_free(
    matrix: Floats, right: Floats, low: Floats, high: Floats, found: Floats, active: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Moves `found` to the least of the numbers that are not held, holding more on the way where they meet
    their bounds; returns what is held then."""
    active = active.copy()
    while not active.all():
        free = np.flatnonzero(~active)
        known = right[free] - matrix[np.ix_(free, np.flatnonzero(active))] @ found[active]
        solution = np.linalg.solve(matrix[np.ix_(free, free)], known)
        direction = solution - found[free]
        bound = np.where(direction > 0.0, high[free], low[free])
        violating = (solution < low[free]) | (solution > high[free])
        if not violating.any():
            found[free] = solution
            break
        shares = np.full(len(free), np.inf)
        shares[violating] = (bound[violating] - found[free][violating]) / direction[violating]
        first = int(shares.argmin())
        found[free] = np.clip(found[free] + shares[first] * direction, low[free], high[free])
        found[free[first]] = bound[first]
        active[free[first]] = True
    return active
