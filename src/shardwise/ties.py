"""Ties: which value is the extreme where several differ by rounding only.

One rule for every extreme that an answer names (the best, the slowest, the tightest): values within a
relative tolerance of the extreme are equal, and the first of them counts. Callers pass the values in the
deciding order: ranks from 0 on, strategies in the order of `StrategyTable.text_order`.

No other module states a tolerance for a comparison of answers, or a slack of bounds for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

TIE = 1e-9
"""Relative difference up to which two figures of one answer are equal. The planner and the checker add in
different orders; they agree to this tolerance."""

PROVEN_TIE = 2.5e-13
"""Relative difference up to which two answers of an exact search are equal. It is above rounding errors, and
a quarter of PROVEN_GAP: any of the equal answers is still proven optimal, which TIE would not ensure."""

ROUNDING = 1e-9
"""Relative slack of a lower bound or of a limit before it excludes anything: sums in another order differ in
their last digits."""

T = TypeVar("T")


def ties_of_largest(values: ArrayLike, tie: float = TIE) -> Any:
    """Mask of the values, along the first axis, that equal the largest."""
    array = np.asarray(values, dtype=np.float64)
    largest = array.max(axis=0)
    with np.errstate(invalid="ignore"):
        return (array == largest) | (array >= largest - tie * np.abs(largest))


def ties_of_least(values: ArrayLike, tie: float = TIE) -> Any:
    """Mask of the values, along the first axis, that equal the least."""
    return ties_of_largest(-np.asarray(values, dtype=np.float64), tie)


def first_largest(values: ArrayLike, tie: float = TIE) -> Any:
    """Index, along the first axis, of the first value that equals the largest."""
    return ties_of_largest(values, tie).argmax(axis=0)


def first_least(values: ArrayLike, tie: float = TIE) -> Any:
    """Index, along the first axis, of the first value that equals the least."""
    return ties_of_least(values, tie).argmax(axis=0)


def first_best(options: Iterable[T], score: Callable[[T], tuple[float, ...]], tie: float = TIE) -> T:
    """The first option whose score equals the largest. A later value of a score decides between options whose
    earlier values are equal."""
    scored = [(option, score(option)) for option in options]
    for place in range(len(scored[0][1])):
        largest = max(values[place] for _, values in scored)
        scored = [one for one in scored if not is_less(one[1][place], largest, tie)]
    return scored[0][0]


def least_first(values: Sequence[float], tie: float = TIE) -> list[int]:
    """Indices of the values in ascending order; equal values stay in their order."""
    remaining, found = list(range(len(values))), []
    while remaining:
        least = min(values[index] for index in remaining)
        found.append(next(index for index in remaining if values[index] <= least + tie * abs(least)))
        remaining.remove(found[-1])
    return found


def is_less(value: float, other: float, tie: float = TIE) -> bool:
    """Whether `value` is less than `other`, and not equal to it."""
    return value < other and not value >= other - tie * abs(other)  # also where `other` is infinite


def are_less(values: ArrayLike, others: ArrayLike, tie: float = TIE) -> Any:
    """Mask of the values that are less than the others, and not equal to them."""
    array, limits = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return (array < limits) & ~(array >= limits - tie * np.abs(limits))
