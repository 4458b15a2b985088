"""Ties: which of several values is the extreme where some differ by rounding alone.

One rule for all that an answer names by its figure (the best, the slowest, the tightest): of the values
within a relative tolerance of the extreme the first one counts as the extreme. Callers give the values in the
order that decides: ranks from 0 on, strategies in the order of `StrategyTable.text_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

TIE = 1e-9
"""Relative difference up to which two figures of one answer are equal; the planner and the checker, which add
up in other orders, agree to as much."""


def ties_of_largest(values: ArrayLike, tie: float = TIE) -> Any:
    """Which of the values, along the first axis, are equal to the largest."""
    array = np.asarray(values, dtype=np.float64)
    largest = array.max(axis=0)
    with np.errstate(invalid="ignore"):
        return (array == largest) | (array >= largest - tie * np.abs(largest))


def ties_of_least(values: ArrayLike, tie: float = TIE) -> Any:
    """Which of the values, along the first axis, are equal to the least."""
    return ties_of_largest(-np.asarray(values, dtype=np.float64), tie)


def first_largest(values: ArrayLike, tie: float = TIE) -> Any:
    """The place, along the first axis, of the first value that is equal to the largest."""
    return ties_of_largest(values, tie).argmax(axis=0)


def first_least(values: ArrayLike, tie: float = TIE) -> Any:
    """The place, along the first axis, of the first value that is equal to the least."""
    return ties_of_least(values, tie).argmax(axis=0)


def least_first(values: Sequence[float], tie: float = TIE) -> list[int]:
    """The places of the values from the least to the largest; equal ones stay in their order."""
    remaining, found = list(range(len(values))), []
    while remaining:
        least = min(values[index] for index in remaining)
        found.append(next(index for index in remaining if values[index] <= least + tie * abs(least)))
        remaining.remove(found[-1])
    return found
