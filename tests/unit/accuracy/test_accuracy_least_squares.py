"""Bounded least squares: by hand, compared with every active set, and no number relies on a change that its
bound excludes.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from shardwise.accuracy.fit import bounded_least_squares

Floats = NDArray[np.float64]


def value(matrix: Floats, right: Floats, x: Floats) -> float:
    return float(x @ matrix @ x / 2 - right @ x)


def least_of_all_sets(matrix: Floats, right: Floats, low: Floats, high: Floats) -> float:
    """The least value over every choice of numbers at their lower bound, at their upper bound, and free."""
    best = np.inf
    for choice in itertools.product((0, 1, 2), repeat=len(right)):
        state = np.array(choice)
        x = np.where(state == 0, low, high)
        free = state == 2
        if free.any():
            known = right[free] - matrix[np.ix_(free, ~free)] @ x[~free]
            x[free] = np.linalg.solve(matrix[np.ix_(free, free)], known)
        if (x >= low - 1e-12).all() and (x <= high + 1e-12).all():
            best = min(best, value(matrix, right, x))
    return best


def test_within_wide_ranges_the_result_is_the_unconstrained_solution() -> None:
    matrix, right = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([1.0, 2.0])
    far = np.full(2, 10.0)
    # 2 x + y = 1, x + 3 y = 2: x = 0.2, y = 0.6.
    assert bounded_least_squares(matrix, right, -far, far).tolist() == pytest.approx([0.2, 0.6])


def test_free_numbers_are_solved_around_active_bounds() -> None:
    matrix, right = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([1.0, 2.0])
    low, high = np.full(2, -10.0), np.array([10.0, 0.3])
    # y stays at 0.3, so 2 x + 0.3 = 1: x = 0.35. With clipping after solving, x would be 0.2.
    assert bounded_least_squares(matrix, right, low, high).tolist() == pytest.approx([0.35, 0.3])


@pytest.mark.slow
def test_a_bound_active_on_the_way_is_released() -> None:
    # From 0 towards (1.4, -0.2, ...) the first bound reached is not active in the solution.
    rng = np.random.default_rng(3)
    let_go = 0
    for _ in range(300):
        factor = rng.normal(size=(4, 4))
        matrix, right = factor @ factor.T + 0.01 * np.eye(4), rng.normal(size=4)
        low, high = -rng.uniform(0.0, 1.0, 4), rng.uniform(0.0, 1.0, 4)
        low[rng.random(4) < 0.2] = high[rng.random(4) < 0.2] = 0.0
        found = bounded_least_squares(matrix, right, low, high)
        assert (found >= low).all() and (found <= high).all()
        least = least_of_all_sets(matrix, right, low, high)
        assert value(matrix, right, found) == pytest.approx(least, abs=1e-10)
        clipped = np.clip(np.linalg.solve(matrix, right), low, high)
        let_go += value(matrix, right, clipped) > least + 1e-3
    assert let_go > 100  # clipping after solving gives another answer


def test_a_problem_without_free_numbers() -> None:
    here = np.array([0.0, 0.0])
    assert bounded_least_squares(np.eye(2), np.ones(2), here, here).tolist() == [0.0, 0.0]
    assert bounded_least_squares(np.empty((0, 0)), np.empty(0), np.empty(0), np.empty(0)).tolist() == []
