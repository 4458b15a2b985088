"""Small Pareto sets worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

import shardwise.pareto.frontier
from shardwise.errors import InternalError
from shardwise.pareto import non_dominated
from shardwise.pareto.frontier import Frontier, frontier_of, product, union, union_all


def test_non_dominated_points_of_two_objectives() -> None:
    """(2,3) dominates (3,3) and (2,4); (4,1) ties with (5,1) in the second objective; the second (1,5) equals
    the first.
    """
    points = np.array([[3, 3], [1, 5], [2, 4], [2, 3], [5, 1], [4, 1], [1, 5]])
    assert non_dominated(points).tolist() == [1, 3, 5]


def test_non_dominated_points_of_three_objectives() -> None:
    """(2,1,2) dominates (2,2,2); (1,3,3) and (3,1,1) are better in some objective; (2,1,2) dominates nothing
    else.
    """
    points = np.array([[2, 2, 2], [1, 3, 3], [3, 1, 1], [2, 1, 2], [3, 1, 1], [3, 1, 2], [1, 3, 3]])
    assert non_dominated(points).tolist() == [1, 3, 2]


def test_product_adds_every_pair_and_points_back() -> None:
    """(1,4)+(1,2) = (2,6), (1,4)+(3,1) = (4,5), (3,1)+(1,2) = (4,3), (3,1)+(3,1) = (6,2); (4,3) dominates
    (4,5).
    """
    a = frontier_of([[3, 1], [1, 4]])
    b = frontier_of([[1, 2], [3, 1]])
    both = product(a, b)
    assert both.points.tolist() == [[2, 6], [4, 3], [6, 2]]
    assert both.choice.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_ties_stay_with_the_first() -> None:
    same = frontier_of([[1, 2], [1, 2]])
    assert same.choice.tolist() == [[0, 0]]
    assert union(same, same).choice.tolist() == [[0, 0]]
    # 1 + 2 = 2 + 1 in the first objective, 4 + 1 = 2 + 3 in the second: pairs (0, 1) and (1, 0) tie.
    a = frontier_of([[1, 4], [2, 2]])
    b = frontier_of([[1, 3], [2, 1]])
    assert product(a, b).choice.tolist() == [[0, 0], [0, 1], [1, 1]]


def test_union_all_names_operand_and_point() -> None:
    parts = [frontier_of([[4, 1], [2, 2]]), frontier_of([[3, 1]]), frontier_of([[1, 9]])]
    joined = union_all(parts)
    assert joined.points.tolist() == [[1, 9], [2, 2], [3, 1]]
    assert joined.choice.tolist() == [[2, 0], [0, 0], [1, 0]]


def test_no_points_are_neutral_for_union_and_absorb_a_product() -> None:
    nothing = frontier_of(np.empty((0, 3)))
    some = frontier_of([[1, 2, 3], [3, 2, 1]])
    assert union(nothing, some).points.tolist() == some.points.tolist()
    assert len(product(nothing, some)) == len(product(some, nothing)) == 0
    assert len(frontier_of(np.empty((0, 2)), epsilon=0.1)) == 0


def test_a_point_at_infinity_stays_only_where_it_is_better() -> None:
    assert non_dominated(np.array([[1.0, np.inf], [2.0, np.inf], [3.0, 1.0]])).tolist() == [0, 2]


def test_epsilon_drops_points_that_another_covers() -> None:
    """A factor of 1.1: (1, 100) and (1.01, 99.5) share a cell, (2, 50) is far, the last is the best in
    objective 1."""
    points = np.array([[1.0, 100.0], [1.01, 99.5], [2.0, 50.0], [2.001, 49.99]])
    assert non_dominated(points, epsilon=0.1).tolist() == [0, 2, 3]
    assert non_dominated(points).tolist() == [0, 1, 2, 3]


def test_epsilon_never_exceeds_its_factor_by_rounding() -> None:
    """The second point exceeds 1.1 times the first by a relative 5e-11: the first may not replace it."""
    points = np.array([[1.0, 10.0], [1.1 * (1.0 + 5e-11), 9.99], [5.0, 1.0]])
    assert non_dominated(points, epsilon=0.1).tolist() == [0, 1, 2]


def test_epsilon_takes_objectives_of_zero() -> None:
    """0 has its own cell: no factor reaches it from 1e-300."""
    points = np.array([[0.0, 5.0], [1e-300, 4.9], [1.0, 0.0]])
    assert non_dominated(points, epsilon=0.1).tolist() == [0, 1, 2]


def test_epsilon_keeps_the_best_of_each_objective() -> None:
    """The first two share a cell; the second is kept for objective 1 alone, the third for objective 2."""
    points = np.array([[1.0, 1.01, 5.01], [1.01, 1.0, 5.0], [3.0, 3.0, 1.0]])
    assert non_dominated(points, epsilon=0.1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("pairs_at_once", [5, 20])
def test_a_product_in_blocks_equals_a_product_at_once(
    monkeypatch: pytest.MonkeyPatch, pairs_at_once: int
) -> None:
    """Blocks of one point of the first operand (of 16), and of two."""
    random_ = np.random.default_rng(1)
    a, b = (frontier_of(random_.integers(0, 40, (60, 3))) for _ in range(2))
    whole = product(a, b)
    monkeypatch.setattr(shardwise.pareto.frontier, "_PAIRS_AT_ONCE", pairs_at_once)
    blocks = product(a, b)
    assert (len(a), len(b)) == (16, 7)
    assert blocks.points.tolist() == whole.points.tolist()
    assert blocks.choice.tolist() == whole.choice.tolist()


@pytest.mark.parametrize("points", [[1.0, 2.0], [[], []], [[[1.0, 2.0]]], [[1.0, float("nan")], [1.0, 2.0]]])
def test_an_invalid_set_of_points_is_refused(points: object) -> None:
    with pytest.raises(InternalError):
        non_dominated(np.array(points))


def test_a_relative_epsilon_refuses_negative_objectives() -> None:
    with pytest.raises(InternalError, match="not negative"):
        non_dominated(np.array([[-1.0, 2.0]]), epsilon=0.1)


def test_union_of_nothing_is_refused() -> None:
    with pytest.raises(InternalError, match="no frontiers"):
        union_all([])


def test_a_frontier_is_as_long_as_its_points() -> None:
    assert len(Frontier(np.zeros((2, 2)), np.zeros((2, 2), dtype=np.intp))) == 2
