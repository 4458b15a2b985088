"""The knee of a frontier of time and memory: by hand, its rule, and its independence of units."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.pareto import knee
from shardwise.pareto.frontier import MEMORY_WORTH, frontier_of


def test_the_knee_by_hand() -> None:
    """A device of 80: time / 10 + memory / 400. 1.15, 1.02 + 0.1 = 1.12, 1.1 + 0.0625, 3 + 0.005."""
    points = np.array([[10.0, 60.0], [10.2, 40.0], [11.0, 25.0], [30.0, 2.0]])
    assert knee(points, 80.0) == 1
    # On a device of 20 the same bytes are worth four times as much: 1.6, 1.42, 1.35, 3.02.
    assert knee(points, 20.0) == 2


def test_memory_that_is_free_is_not_paid_for() -> None:
    """The chord of logarithms had its knee at 2.9 times the time, where 98 % of the memory was free anyway.
    2 % more time frees 8 of 80, which is 10 %: enough; 3 % more frees 8 of 80: too little.
    """
    assert knee(np.array([[1.0, 2.0], [2.9, 0.1]]), 80.0) is None
    assert knee(np.array([[1.0, 70.0], [1.019, 62.0]]), 80.0) == 1
    assert knee(np.array([[1.0, 70.0], [1.03, 62.0]]), 80.0) is None


def test_the_first_of_equal_points_is_chosen() -> None:
    """1 + 0.1 = 1.05 + 0.05: both are worth the same; the fastest stays."""
    assert knee(np.array([[1.0, 50.0], [1.05, 25.0]]), 100.0) is None
    assert knee(np.array([[1.0, 90.0], [1.05, 50.0], [1.1, 25.0]]), 100.0) == 1


@pytest.mark.parametrize("points", [np.zeros((0, 2)), [[1.0, 1.0]]])
def test_fewer_than_two_points_have_no_knee(points: object) -> None:
    assert knee(np.asarray(points), 1.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_each_percent_of_time_frees_5_percent_up_to_the_knee_and_less_beyond(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = frontier_of(np.exp(rng.normal(scale=0.3, size=(60, 2)))).points
    capacity = 1.2 * points[0, 1]
    place = knee(points, capacity)
    # Powers of two scale exactly, so any unit of seconds and bytes can be tested.
    assert knee(points * np.array([1024.0, 2.0**-30]), capacity * 2.0**-30) == place
    at = points[place or 0]
    slower = (points[:, 0] - at[0]) / points[0, 0]
    freed = (at[1] - points[:, 1]) / capacity
    later, earlier = slower > 0.0, slower < 0.0
    assert (MEMORY_WORTH * freed[later] <= slower[later] + 1e-9).all()
    # From an earlier point to the knee both have the other sign.
    assert (MEMORY_WORTH * freed[earlier] <= slower[earlier] + 1e-9).all()
