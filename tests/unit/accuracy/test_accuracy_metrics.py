"""Summaries of errors, by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from shardwise.accuracy.validate import errors_of, kendall_tau, mean, regret, share


def test_errors() -> None:
    found = errors_of([0.1, -0.3, 0.2, 0.0])
    assert found is not None
    # Sizes 0, 0.1, 0.2, 0.3: mean 0.6 / 4, median (0.1 + 0.2) / 2; with signs 0.0 / 4.
    assert found.n == 4
    assert found.mape == pytest.approx(0.15)
    assert found.median == pytest.approx(0.15)
    assert found.bias == pytest.approx(0.0)
    assert found.worst == pytest.approx(0.3)
    assert errors_of([]) is None


def test_tau_is_one_for_the_same_order_and_minus_one_for_the_reverse() -> None:
    assert kendall_tau([1, 2, 3, 4, 5], [10, 20, 30, 40, 50]) == 1.0
    assert kendall_tau([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]) == -1.0


def test_tau_by_hand() -> None:
    # Of the ten pairs, (4, 3) and (5, 3) are in the wrong order: (8 - 2) / 10.
    assert kendall_tau([1, 2, 3, 4, 5], [1, 2, 5, 3, 4]) == pytest.approx(0.6)


def test_tau_with_ties() -> None:
    # Pairs: 1-2 tied in prediction, 1-3, 1-4, 2-3, 2-4 right, 3-4 tied in measurement.
    # tau-b: 4 / sqrt(5 * 5): of six pairs five are not tied in the one, five not in the other.
    assert kendall_tau([1, 2, 3, 3], [1, 1, 2, 3]) == pytest.approx(4 / 5)
    # 1-2 tied in both, the rest right: 2 / sqrt(2 * 2).
    assert kendall_tau([1, 1, 2], [5, 5, 6]) == pytest.approx(1.0)


def test_tau_where_nothing_can_be_ranked() -> None:
    assert kendall_tau([1, 2, 3], [7, 7, 7]) == 0.0
    assert kendall_tau([2, 2, 2], [1, 2, 3]) is None
    assert kendall_tau([1], [1]) is None
    assert kendall_tau([], []) is None


def test_regret_by_hand() -> None:
    # The third has the best prediction and takes 1.2; the best takes 1.0.
    assert regret([1.0, 1.5, 1.2], [3.0, 4.0, 2.0]) == pytest.approx(0.2)
    assert regret([1.0, 1.5, 1.2], [2.0, 4.0, 3.0]) == 0.0


def test_ties_in_prediction_take_the_worst() -> None:
    assert regret([1.0, 1.5, 1.2], [2.0, 2.0, 3.0]) == pytest.approx(0.5)
    # A difference by rounding is a tie, a thousandth is not.
    assert regret([1.0, 1.5], [2.0, 2.0 * (1 + 1e-12)]) == pytest.approx(0.5)
    assert regret([1.0, 1.5], [2.0, 2.002]) == 0.0


def test_shares_and_means() -> None:
    assert share([True, False, True, True]) == 0.75
    assert share([]) is None
    assert mean([0.1] * 10) == 0.1
    assert math.isclose(mean([1.0, 2.0]), 1.5)


def test_kendall_tau_of_many_values() -> None:
    """Neighbours are swapped in 50,000 pairs of 100,000 values: 1 - 2 * 50,000 / (100,000 * 99,999 / 2).

    With a loop over all pairs this takes a minute."""
    measured = np.arange(100_000)
    assert kendall_tau(measured, measured ^ 1) == pytest.approx(1.0 - 2.0 / 99_999, rel=1e-12)  # type: ignore[arg-type]


def test_kendall_tau_is_the_sum_over_all_pairs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        count, values = rng.randint(2, 12), rng.choice([2, 5, 40])
        a, x = ([rng.randrange(values) for _ in range(count)] for _ in range(2))
        signs = [
            ((a[i] > a[j]) - (a[i] < a[j]), (x[i] > x[j]) - (x[i] < x[j]))
            for i, j in itertools.combinations(range(count), 2)
        ]
        untied_a, untied_x = (sum(sign[place] != 0 for sign in signs) for place in (0, 1))
        expected = None if not untied_a else 0.0
        if untied_a and untied_x:
            expected = sum(of_a * of_x for of_a, of_x in signs) / math.sqrt(untied_a * untied_x)
        assert kendall_tau(a, x) == (None if expected is None else pytest.approx(expected)), (a, x)
