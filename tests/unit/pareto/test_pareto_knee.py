"""The knee of a frontier: by hand, and independent of units."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.pareto import knee
from shardwise.pareto.frontier import frontier_of


def test_the_point_farthest_below_the_chord() -> None:
    # As logarithms (0, 4) (1, 1) (2, 0.5) (4, 0); scaled by 4 their sums are 1, 0.5, 0.625, 1, and that of
    # the chord is 1: they are 0, 0.5, 0.375 and 0 below it.
    points = np.exp2([[0.0, 4.0], [1.0, 1.0], [2.0, 0.5], [4.0, 0.0]])
    assert knee(points) == 1


def test_the_first_of_equal_points_is_chosen() -> None:
    # (0, 4) (1, 2) (2, 1) (4, 0): sums 1, 0.75, 0.75, 1.
    assert knee(np.exp2([[0.0, 4.0], [1.0, 2.0], [2.0, 1.0], [4.0, 0.0]])) == 1


@pytest.mark.parametrize(
    "points",
    [
        np.zeros((0, 2)),
        [[1.0, 1.0]],
        [[1.0, 2.0], [2.0, 1.0]],
        np.exp2([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]]),  # on the chord
        np.exp2([[0.0, 2.0], [1.0, 1.9], [2.0, 0.0]]),  # above it
        [[3.0**k, 7.0 ** (5 - k)] for k in range(6)],  # on the chord, but for rounding
    ],
)
def test_a_straight_frontier_has_no_knee(points: object) -> None:
    assert knee(np.asarray(points)) is None


@pytest.mark.parametrize("seed", range(20))
def test_units_do_not_change_the_knee_and_no_point_is_below_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = frontier_of(np.exp(rng.normal(size=(60, 2)))).points
    place = knee(points)
    # Powers of two scale exactly, so any unit of seconds and bytes can be tested.
    assert knee(points * np.array([1024.0, 2.0**-30])) == place
    logs = np.log(points)
    first, last = logs[0], logs[-1]
    # Twice the area of the triangle with the chord, by the cross product, is the distance times its length.
    areas = (last[0] - first[0]) * (first[1] - logs[:, 1]) - (first[0] - logs[:, 0]) * (last[1] - first[1])
    if place is not None:
        scale = abs(last[0] - first[0]) * abs(last[1] - first[1])
        assert areas[place] / scale == pytest.approx(areas.max() / scale, abs=1e-12)
        assert areas[place] > 0
