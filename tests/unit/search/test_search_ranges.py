"""Ranges of numbers of recomputed layers, and the order in which a frontier search visits rows."""

from __future__ import annotations

import numpy as np

from shardwise.search.bnb.branch import Ranges, ranges_from
from shardwise.search.bnb.incumbent import Tradeoff


def test_rows_have_the_choices_for_their_largest_stage() -> None:
    choices = {3: [1, 2, 3], 5: [1, 3, 5]}
    ranges, fewer = ranges_from(np.array([2, 1, 4]), np.array([3, 5, 5]), lambda most: choices[most])
    by_row = [ranges.numbers[a:b].tolist() for a, b in zip(ranges.start, ranges.stop, strict=True)]
    assert by_row == [[2, 3], [1, 3, 5], [5]]
    assert fewer.tolist() == [1, 0, 2]


def test_halves_hold_every_number_once() -> None:
    numbers = np.arange(10, 23)
    ranges = Ranges(numbers, np.array([7, 8, 9]), np.array([0, 4, 5]), np.array([4, 5, 13]))
    depth = 0
    while (ranges.width > 1).any():
        ranges, depth = ranges.halved(), depth + 1
    # 8 numbers need three halvings.
    assert depth == 3
    assert ranges.least.tolist() == ranges.most.tolist() == numbers.tolist()
    assert ranges.row.tolist() == [7] * 4 + [8] + [9] * 8


def test_a_frontier_takes_non_dominated_nodes_first() -> None:
    # Dominated: the third (2.2 s) by the second (2.0 s), the fifth (1.5 s) by the fourth (1.0 s).
    time_s, device_bytes = np.array([3.0, 2.0, 2.2, 1.0, 1.5]), np.array([1.0, 2.0, 3.0, 4.0, 4.0])
    assert Tradeoff().order(time_s, device_bytes).tolist() == [3, 1, 0, 2, 4]
