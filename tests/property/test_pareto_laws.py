"""The laws of the algebra of Pareto sets, compared with a quadratic definition of dominance."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.pareto import non_dominated
from shardwise.pareto.frontier import Frontier, frontier_of, product, union, union_all

REDUCE: Any = import_module("shardwise.pareto.frontier")

# Small whole numbers: many ties, and sums that are exact in any order.
Rows = list[list[int]]


def rows_of(objectives: int, *, largest: int = 12, most: int = 14) -> st.SearchStrategy[Rows]:
    row = st.lists(st.integers(0, largest), min_size=objectives, max_size=objectives)
    return st.lists(row, max_size=most)


def sets_of_rows(number: int, *, most: int = 14) -> st.SearchStrategy[tuple[npt.NDArray[np.float64], ...]]:
    """`number` sets of points with the same number of objectives, two or three."""
    return st.integers(2, 3).flatmap(
        lambda k: st.tuples(
            *[
                rows_of(k, most=most).map(lambda rows: np.array(rows, dtype=np.float64).reshape(-1, k))
                for _ in range(number)
            ]
        )
    )


def slow_reduce(points: npt.NDArray[np.float64]) -> list[int]:
    """The definition: row i is dropped if some row is nowhere larger, and smaller somewhere or equal and
    earlier.
    """
    rows = [tuple(row) for row in points.tolist()]
    remaining = [
        i
        for i, row in enumerate(rows)
        if not any(
            all(x <= y for x, y in zip(other, row, strict=True)) and (other != row or j < i)
            for j, other in enumerate(rows)
        )
    ]
    return sorted(remaining, key=lambda i: rows[i])


def as_rows(frontier: Frontier) -> list[list[float]]:
    rows: list[list[float]] = frontier.points.tolist()
    return rows


@given(sets_of_rows(1, most=40))
def test_reduce_is_its_definition(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    (points,) = sets
    assert non_dominated(points).tolist() == slow_reduce(points)


@given(st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), rows_of(k, largest=4, most=40))), st.data())
def test_reduce_of_many_cells_is_that_of_each(sample: tuple[int, Rows], data: st.DataObject) -> None:
    objectives, rows = sample
    points = np.array(rows, dtype=np.float64).reshape(-1, objectives)
    own = st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))
    cells = np.array(data.draw(own), dtype=np.intp)
    by_cell: list[int] = []
    for cell in sorted(set(cells.tolist())):
        places = np.flatnonzero(cells == cell)
        by_cell += places[slow_reduce(points[places])].tolist()
    assert non_dominated(points, groups=cells).tolist() == by_cell


@pytest.mark.parametrize("objectives", [2, 3, 4, 5])
def test_reduce_is_its_definition_on_large_sets(objectives: int) -> None:
    """Sets of 300 points: scattered, on a coarse grid (ties), and on a shell where all points stay."""
    random_ = np.random.default_rng(objectives)
    scattered = random_.random((300, objectives))
    shell = scattered / np.linalg.norm(scattered, axis=1)[:, None]
    for points in (scattered, np.floor(scattered * 8), shell):
        assert non_dominated(points).tolist() == slow_reduce(points)
    assert len(non_dominated(shell)) == 300


def differs_in_large_cells(seed: int) -> bool:
    """Whether reduce differs from its definition on cells of about 300 points of 4 objectives: more than are
    compared at once, in a cell and in total.
    """
    random_ = np.random.default_rng(seed)
    points = random_.random((600, 4))
    points[:, 3] = 3.0 + 0.2 * points[:, 3] - points[:, :3].sum(axis=1)  # about equally good
    points = np.floor(points * 50.0)
    cells = random_.integers(0, 2, 600)
    by_cell: list[int] = []
    for cell in range(2):
        places = np.flatnonzero(cells == cell)
        by_cell += places[slow_reduce(points[places])].tolist()
    assert 300 < len(by_cell) < 600
    return bool(non_dominated(points, groups=cells).tolist() != by_cell)


def test_reduce_of_large_cells_is_that_of_each() -> None:
    assert not any(differs_in_large_cells(seed) for seed in range(2))


def test_a_comparison_across_cells_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_below = REDUCE._is_below

    def across(others: Any, group_of_others: Any, columns: Any, cell: Any) -> Any:
        return is_below(others, np.zeros_like(group_of_others), columns, np.zeros_like(cell))

    monkeypatch.setattr(REDUCE, "_is_below", across)
    assert any(differs_in_large_cells(seed) for seed in range(2))


def test_more_values_than_16_bits_count_are_distinguished() -> None:
    """40,000 points on a line above one point that matches them all, preceded by four that are best in one
    objective and dominate none: ranks of 32,768 and more are compared.
    """
    line = np.repeat(np.arange(20_000.0, 60_001.0)[:, None], 4, axis=1)
    best_in_one = 70_000.0 * (1.0 - np.eye(4))
    best_in_one[1:, 0] = 10.0
    assert set(non_dominated(np.concatenate([best_in_one, line])).tolist()) == {0, 1, 2, 3, 4}


def test_the_definition_catches_a_reduce_that_forgets_ties() -> None:
    """The mutant without the rule for equal rows differs from the definition."""
    points = np.array([[1.0, 2.0], [1.0, 2.0]])
    forgetful = [i for i, row in enumerate(points) if not (points < row).all(axis=1).any()]
    assert forgetful != slow_reduce(points)


@given(sets_of_rows(1))
def test_reduce_is_idempotent(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    once = frontier_of(sets[0])
    assert as_rows(frontier_of(once.points)) == as_rows(once)
    assert sorted(as_rows(once)) == as_rows(once)


@pytest.mark.slow
@given(sets_of_rows(2))
def test_union_and_product_are_commutative(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    a, b = map(frontier_of, sets)
    assert as_rows(union(a, b)) == as_rows(union(b, a))
    assert as_rows(product(a, b)) == as_rows(product(b, a))


@pytest.mark.slow
@given(sets_of_rows(3, most=8))
def test_union_and_product_are_associative(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    a, b, c = map(frontier_of, sets)
    assert as_rows(union(union(a, b), c)) == as_rows(union(a, union(b, c))) == as_rows(union_all([a, b, c]))
    assert as_rows(product(product(a, b), c)) == as_rows(product(a, product(b, c)))


@pytest.mark.slow
@given(sets_of_rows(3, most=8))
def test_product_distributes_over_union(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    a, b, c = map(frontier_of, sets)
    assert as_rows(product(a, union(b, c))) == as_rows(union(product(a, b), product(a, c)))


@pytest.mark.slow
@given(sets_of_rows(2))
def test_union_and_product_are_their_definitions(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    """Reducing before or after makes no difference: the unreduced sets give the same points."""
    first, second = sets
    a, b = frontier_of(first), frontier_of(second)
    both = np.concatenate([first, second])
    assert as_rows(union(a, b)) == both[slow_reduce(both)].tolist()
    sums = (first[:, None, :] + second[None, :, :]).reshape(-1, first.shape[1])
    assert as_rows(product(a, b)) == sums[slow_reduce(sums)].tolist()


@pytest.mark.slow
@given(sets_of_rows(3))
def test_back_pointers_lead_to_points_that_sum_to_the_point(sets: Sequence[npt.NDArray[np.float64]]) -> None:
    a, b, c = map(frontier_of, sets)
    inner = union(b, c)
    outer = product(a, inner)
    for point, (in_a, in_inner) in zip(outer.points, outer.choice, strict=True):
        operand, place = inner.choice[in_inner]
        rows, frontier = ((sets[1], b), (sets[2], c))[operand]
        leaf_a, leaf = a.choice[in_a][1], frontier.choice[place][1]
        assert (sets[0][leaf_a] + rows[leaf] == point).all()


@pytest.mark.slow
@given(sets_of_rows(2), st.sampled_from([0.01, 0.1, 0.5, 2.0]))
def test_epsilon_keeps_a_point_within_its_factor(
    sets: Sequence[npt.NDArray[np.float64]], epsilon: float
) -> None:
    """Once for a reduce or union, squared for a product whose first operand was reduced with epsilon too."""
    exact_a, exact_b = map(frontier_of, sets)
    near_a = frontier_of(sets[0], epsilon=epsilon)
    assert _covers(near_a, exact_a, 1.0 + epsilon)
    assert _covers(union(exact_a, exact_b, epsilon=epsilon), union(exact_a, exact_b), 1.0 + epsilon)
    near = product(near_a, exact_b, epsilon=epsilon)
    assert _covers(near, product(exact_a, exact_b), (1.0 + epsilon) ** 2)
    if len(exact_a):
        assert (near_a.points.min(axis=0) == exact_a.points.min(axis=0)).all()


def test_epsilon_covers_a_dense_frontier_with_few_points() -> None:
    """10,000 points over a factor of e in time: a 1 % grid has about ln(e) / ln(1.01) = 100 columns."""
    times = np.exp(np.linspace(0.0, 1.0, 10_000))
    exact = frontier_of(np.column_stack([times, 1.0 / times]))
    near = frontier_of(exact.points, epsilon=0.01)
    assert len(exact) == 10_000
    assert 100 <= len(near) <= 210
    assert _covers(near, exact, 1.01)


def test_covering_is_not_vacuous() -> None:
    """Half of a frontier does not cover the whole within 1 %."""
    exact = frontier_of([[1.0, 4.0], [2.0, 3.0], [4.0, 1.0]])
    assert not _covers(Frontier(exact.points[::2], exact.choice[::2]), exact, 1.01)


def _covers(near: Frontier, exact: Frontier, factor: float) -> bool:
    limit = exact.points[:, None, :] * factor * (1.0 + 1e-12)
    is_within = np.all(near.points[None, :, :] <= limit, axis=2)
    return bool(np.all(np.any(is_within, axis=1)))
