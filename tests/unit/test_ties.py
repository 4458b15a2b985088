"""Of values that are equal up to rounding, the first counts as the extreme."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.plans import PROVEN_GAP
from shardwise.ties import (
    PROVEN_TIE,
    TIE,
    are_less,
    first_best,
    first_largest,
    first_least,
    is_less,
    least_first,
    ties_of_largest,
    ties_of_least,
)

BELOW, ABOVE = 1.0 - 0.9 * TIE, 1.0 - 1.1 * TIE
"""Just inside of the tolerance below 1, and just outside."""


@pytest.mark.parametrize(
    ("values", "largest", "least"),
    [
        ([1.0, 3.0, 2.0], 1, 0),
        ([BELOW, 1.0], 0, 0),  # equal: the first
        ([ABOVE, 1.0], 1, 0),  # apart
        ([1.0, BELOW], 0, 0),
        ([1.0, ABOVE], 0, 1),
        ([-1.0, -BELOW], 0, 0),  # relative to the magnitude
        ([-1.0, -ABOVE], 1, 0),
        ([0.0, 0.0], 0, 0),
        ([0.0, 1e-300], 1, 0),  # nothing but zero is equal to zero
        ([float("inf"), 1.0], 0, 1),
        ([7.0], 0, 0),
    ],
)
def test_the_first_of_equals_is_the_extreme(values: list[float], largest: int, least: int) -> None:
    assert first_largest(values) == largest
    assert first_least(values) == least


def test_ties_are_compared_with_the_extreme_and_not_in_chains() -> None:
    """Each is within the tolerance of the next one; the first is not within it of the largest."""
    chain = [1.0 - 1.6 * TIE, 1.0 - 0.8 * TIE, 1.0]
    assert ties_of_largest(chain).tolist() == [False, True, True]
    assert first_largest(chain) == 1
    assert ties_of_least(chain).tolist() == [True, True, False]
    # 1 - 1.6 TIE is the least and 1 - 0.8 TIE the first of its equals; then it is alone again.
    assert least_first(chain[::-1]) == [1, 2, 0]


def test_a_tolerance_may_be_given() -> None:
    assert first_largest([0.9, 1.0], 0.2) == 0
    assert first_largest([0.9, 1.0], 0.05) == 1
    assert first_largest([BELOW, 1.0], 0.0) == 1


def test_columns_are_judged_one_by_one() -> None:
    rows = np.array([[1.0, 2.0, BELOW], [2.0, 1.0, 1.0]])
    assert first_largest(rows).tolist() == [1, 0, 0]
    assert first_least(rows).tolist() == [0, 1, 0]


def test_sorting_respects_ties() -> None:
    assert least_first([3.0, 1.0, 2.0]) == [1, 2, 0]
    assert least_first([1.0, BELOW, 0.5]) == [
        2,
        0,
        1,
    ]  # 1.0 is equal to the least of the rest and comes first
    assert least_first([]) == []


def test_a_mutant_without_tolerance_is_noticed() -> None:
    """The mutant returns the results of numpy and Python, which depend on rounding."""
    values = [BELOW, 1.0]
    assert int(np.argmax(values)) == max(range(2), key=values.__getitem__) == 1
    assert first_largest(values) == 0


@pytest.mark.parametrize(
    ("value", "other", "less"),
    [
        (1.0, 2.0, True),
        (2.0, 1.0, False),
        (1.0, 1.0, False),
        (BELOW, 1.0, False),  # equal
        (ABOVE, 1.0, True),
        (-1.0, -BELOW, False),
        (-1.0, -ABOVE, True),
        (0.0, 1e-300, True),  # nothing but zero is equal to zero
        (1.0, float("inf"), True),
        (float("inf"), float("inf"), False),
    ],
)
def test_a_value_is_less_where_it_is_not_equal(value: float, other: float, less: bool) -> None:
    assert is_less(value, other) is less
    assert are_less([value, 1.0], [other, 2.0]).tolist() == [less, True]


Score = tuple[float, float]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(1.0, 5.0), (2.0, 3.0), (2.0, 4.0)], 2),  # the second value decides between equal first ones
        ([(BELOW, 3.0), (1.0, 3.0)], 0),  # equal in both: the first
        ([(BELOW, 4.0), (1.0, 3.0)], 0),  # equal in the first value, larger in the second
        ([(BELOW, 3.0), (1.0, 4.0)], 1),
        ([(ABOVE, 4.0), (1.0, 3.0)], 1),  # the first value decides, whatever the second is
        ([(float("inf"), 1.0), (float("inf"), 2.0), (9.0, 9.0)], 1),
        ([(-1.0, 0.0), (-BELOW, 0.0)], 0),
    ],
)
def test_the_first_of_equal_options_is_the_best(scores: list[Score], best: int) -> None:
    assert first_best(range(len(scores)), scores.__getitem__) == best


def test_a_mutant_that_compares_scores_exactly_is_noticed() -> None:
    """`max` takes the second option, whose first value is larger by rounding and whose second is smaller."""
    scores = [(BELOW, 4.0), (1.0, 3.0)]
    assert max(scores) == scores[1]
    assert first_best(scores, lambda score: score) == scores[0]


def test_equal_answers_are_both_proven_optimal() -> None:
    """The checker refutes an optimum from PROVEN_GAP on. An answer may be equal to one that is equal to the
    best: 2 x 2.5e-13 = 5e-13, half of 1e-12. With TIE it would be refuted.
    """
    assert (1.0 - PROVEN_TIE) ** 2 > 1.0 - 0.6 * PROVEN_GAP
    assert 1.0 - TIE < 1.0 - PROVEN_GAP
    assert 1.0 + PROVEN_TIE > 1.0 + 1000 * 2.0**-53  # a thousand roundings of a sum
