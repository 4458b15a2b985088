"""Least squares of relative errors, with coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

MOST_COLUMNS = 8
"""All subsets of the columns are looked at."""


def coefficients(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    known_s: Sequence[float] | None = None,
    scale_s: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The c >= 0 with the least sum of ((known_s + columns c - seconds) / scale_s)^2; one column per
    coefficient. The scale is the measured seconds where it is not given: errors count in relation to them.

    The best coefficients are the plain least squares on the columns whose coefficient is not 0, so the best
    subset whose plain solution is nowhere negative is the answer.
    """
    measured = np.asarray(seconds, dtype=float)
    by = measured if scale_s is None else np.asarray(scale_s, dtype=float)
    relative = np.asarray(columns, dtype=float).T / by[:, None]
    target = (measured if known_s is None else measured - np.asarray(known_s, dtype=float)) / by
    count = relative.shape[1]
    if not 1 <= count <= MOST_COLUMNS:
        raise ValueError(f"{count} columns")
    # Columns differ by many powers of ten: solved each at its own scale.
    scale = np.where(np.abs(relative).max(axis=0) > 0.0, np.abs(relative).max(axis=0), 1.0)
    best, least = np.zeros(count), float((target**2).sum())
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            found = np.linalg.lstsq(relative[:, subset] / scale[list(subset)], target, rcond=None)
            solution = found[0] / scale[list(subset)]
            loss = float(((relative[:, subset] @ solution - target) ** 2).sum())
            if (solution >= 0.0).all() and loss < least * (1.0 - 1e-12):
                best, least = np.zeros(count), loss
                best[list(subset)] = solution
    return tuple(best.tolist())
