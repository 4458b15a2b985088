"""Least squares of numbers that have ranges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SLACK = 1e-12
"""A pull across a bound counts from this share of the largest of the right-hand side."""


def least_in_box(matrix: Floats, right: Floats, low: Floats, high: Floats) -> Floats:
    """The x between `low` and `high`, (n,) each, at which x'Mx / 2 - r'x is least.

    `matrix` M (n, n) is positive definite, of normal equations for instance; `right` is r. By active sets:
    what would leave its range on the way to the solution is held at its bound and the others are solved for
    anew; what pulls back from its bound is let go, the strongest first. Every solve lowers the sum, so no set
    comes twice (Stark and Parker 1995, bounded-variable least squares).
    """
    found: Floats = np.clip(0.0, low, high)
    held = low >= high
    slack = SLACK * max(float(np.abs(right).max(initial=0.0)), 1e-300)
    while True:
        held = _solved(matrix, right, low, high, found, held)
        downhill = right - matrix @ found
        inward = np.where(found <= low, downhill, -downhill)
        back = np.where(held & (low < high), inward, -np.inf)
        if not len(back) or back.max() <= slack:
            return found
        held[int(back.argmax())] = False


def _solved(
    matrix: Floats, right: Floats, low: Floats, high: Floats, found: Floats, held: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Moves `found` to the least of the numbers that are not held, holding more on the way where they meet
    their bounds; returns what is held then."""
    held = held.copy()
    while not held.all():
        free = np.flatnonzero(~held)
        known = right[free] - matrix[np.ix_(free, np.flatnonzero(held))] @ found[held]
        aim = np.linalg.solve(matrix[np.ix_(free, free)], known)
        way = aim - found[free]
        bound = np.where(way > 0.0, high[free], low[free])
        leaves = (aim < low[free]) | (aim > high[free])
        if not leaves.any():
            found[free] = aim
            break
        shares = np.full(len(free), np.inf)
        shares[leaves] = (bound[leaves] - found[free][leaves]) / way[leaves]
        first = int(shares.argmin())
        found[free] = np.clip(found[free] + shares[first] * way, low[free], high[free])
        found[free[first]] = bound[first]
        held[free[first]] = True
    return held
