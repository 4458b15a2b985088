"""Labels of a segment from compiled code in one call equal those made step by step, within the same
tolerance; and equal factors are recognised correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.pareto_tuning import tune
from tests.property.pareto_instances import chain_of, chain_with_shared, complete_graph, equal_layers
from tests.property.test_search_pareto_epsilon import spent_in_a_part, spent_in_equal_layers

from shardwise.pareto import Factor, FactorGraph, first_occurrences
from shardwise.search.pareto import elimination, elimination_numba, labels, numba_dispatch, presolve
from shardwise.search.pareto.elimination import EliminationLimits, eliminated
from shardwise.search.pareto.elimination_order import EliminationOrder, order_of
from shardwise.search.pareto.labels import Labels, TooManyLabels
from shardwise.search.pareto.solution import part_costs
from shardwise.search.pareto.state import orders_of
from shardwise.search.pareto.weighted_sums import ChainWeights, FactorSums, chain_sums

NEVER = 1 << 60


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code for every part."""
    assert numba_dispatch.is_installed(), "pip install 'shardwise[fast]'"
    tune(monkeypatch, numba_from_pairs=0, numba_from_costs=0)


def some_parts(seeds: range) -> Iterator[tuple[int, FactorGraph]]:
    """Parts of all shapes, some with equal layers."""
    for seed in seeds:
        chain = chain_of(seed, operators=8, layouts=4) if seed % 2 else chain_with_shared(seed)
        every = [part for segment in chain for _, part in segment.modes]
        for part in [*every, equal_layers(seed), complete_graph(seed)]:
            if part.factors:
                yield seed, part


def labels_both_ways(seed: int, part: FactorGraph, monkeypatch: pytest.MonkeyPatch) -> list[Labels]:
    """The labels of a part near its least sums, in one compiled call and step by step."""
    random = np.random.default_rng(seed)
    weights = random.uniform(0.0, 1.0, (int(random.integers(1, 4)), 5)).round(2)
    peak_shares = ((int(random.integers(len(part.factors))), 1.0),)
    found, near = [], float(random.uniform(1.0, 1.6))
    for numba_from in (0, NEVER):
        tune(monkeypatch, numba_from_costs=numba_from)
        order = order_of(part)
        factor_sums = FactorSums.of(part, order, weights, peak_shares)
        assert (factor_sums.flat is not None) == (numba_from == 0)
        factor_sums.distribute(np.zeros_like(factor_sums.last))
        finite = factor_sums.last[np.isfinite(factor_sums.last).all(axis=-1)]
        limit = float(finite.max(axis=1).min() * near) + 1.0 if len(finite) else 1.0
        found.append(eliminated(part, order, EliminationLimits(factor_sums, limit)))
    return found


def contents(found: Labels) -> list[tuple[float, ...]]:
    """Cells with their labels, the cells by their variables in ascending order."""
    order = np.argsort(found.variables)
    at = found.coordinates()
    cells = [at[found.variables[place]].tolist() for place in order]
    rows = zip(*cells, *found.points.round(9).T.tolist(), strict=True)
    return sorted(rows)


def agree(seeds: range, monkeypatch: pytest.MonkeyPatch) -> bool:
    return all(
        contents(at_once) == contents(by_steps)
        for at_once, by_steps in (
            labels_both_ways(seed, part, monkeypatch) for seed, part in some_parts(seeds)
        )
    )


@pytest.mark.slow
def test_labels_made_at_once_equal_those_made_step_by_step(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    assert agree(range(200 if full else 40), monkeypatch)


@pytest.mark.slow
def test_the_choices_of_each_label_have_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0
    for seed, part in some_parts(range(20)):
        found, _ = labels_both_ways(seed, part, monkeypatch)
        for row in range(0, len(found), max(len(found) // 20, 1)):
            chosen = labels.chosen(found, np.array([row]))
            own = part_costs(part, tuple(int(chosen[variable][0]) for variable in range(len(part.sizes))))
            assert own == pytest.approx(found.points[row])
            checked += 1
    assert checked > 500


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the steps in Python, so that they call the patched functions."""
    for function in ("eliminated_labels", "_sides", "_pruning", "_dominance_arrays", "_smallest_first"):
        monkeypatch.setattr(elimination_numba, function, getattr(elimination_numba, function).py_func)


def own_outside_only(given: Any, *rest: Any) -> Any:
    """The mutant uses only the table's own outside sums, not those of equal tables."""
    own = np.arange(len(given.first))
    return WITHIN(given._replace(first=own), *rest)


def whole_peak_everywhere(given: Any, *rest: Any) -> Any:
    """The mutant weighs the whole peak in every table."""
    return WITHIN(given._replace(shares=np.ones(len(given.shares))), *rest)


def joined_with_itself(given: Any, outside_sums: Any, tables: Any, buffer: Any, made: int, which: int) -> Any:
    """The mutant joins a table with itself."""
    return SIDE(given, outside_sums, tables, buffer, made, 0)


WITHIN, SIDE, DOMINANCE = (
    elimination_numba._pruning,
    elimination_numba._side,
    elimination_numba._dominance_arrays,
)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_pruning", own_outside_only), ("_pruning", whole_peak_everywhere), ("_side", joined_with_itself)],
)
def test_a_broken_step_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any]
) -> None:
    in_python(monkeypatch)
    assert agree(range(2), monkeypatch)
    monkeypatch.setattr(elimination_numba, name, broken)
    assert not agree(range(30), monkeypatch)


@pytest.mark.slow
def test_elimination_by_numba_stays_within_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, tolerance_from_pairs=0)
    for found in (
        [spent_in_a_part(seed) for seed in range(30)],
        [spent_in_equal_layers(seed) for seed in range(12)],
    ):
        assert sum(left_out for left_out, _ in found) > 40
        assert all(is_matched for _, is_matched in found)


def whole_tolerance_each_step(
    given: Any, outside_sums: Any, tolerance: Any, made: int, part: float, *rest: Any
) -> Any:
    """The mutant spends the whole tolerance in each step, whatever was spent before."""
    return DOMINANCE(given, outside_sums, tolerance, made, 1.0, *rest)


def no_potential(given: Any, outside_sums: Any, tolerance: Any, *rest: Any) -> Any:
    """The mutant leaves the potential out of excesses."""
    return DOMINANCE(
        given, outside_sums, tolerance._replace(potentials=np.zeros_like(tolerance.potentials)), *rest
    )


@pytest.mark.slow
@pytest.mark.parametrize("broken", [whole_tolerance_each_step, no_potential])
def test_tolerances_by_numba_that_add_up_to_too_much_are_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]
) -> None:
    tune(monkeypatch, tolerance_from_pairs=0)
    in_python(monkeypatch)
    assert all(spent_in_equal_layers(seed)[1] for seed in range(2))
    monkeypatch.setattr(elimination_numba, "_dominance_arrays", broken)
    assert not all(spent_in_equal_layers(seed)[1] for seed in range(40))


@pytest.mark.parametrize("limit", ["most_pairs_if_exact", "most_labels_if_exact"])
def test_too_many_labels_raise(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    tune(monkeypatch, **{limit: 1}, labels_per_cell=0)
    with pytest.raises(TooManyLabels):
        labels_both_ways(0, complete_graph(0), monkeypatch)


def test_a_table_without_a_plain_order_is_eliminated_step_by_step() -> None:
    costs = np.zeros((2, 5))
    part = FactorGraph(("a", "b"), (2, 2), (Factor((0,), costs),), entry=0, exit=1)
    assert not elimination.is_plain(order_of(part))
    factor_sums = FactorSums.of(part, order_of(part), np.ones((1, 5)))
    assert elimination.is_plain(order_of(equal_layers(0)))
    factor_sums.distribute(np.zeros_like(factor_sums.last))
    # The exit has no costs, so both of its choices stay.
    assert sorted(eliminated(part, order_of(part), EliminationLimits(factor_sums, 1.0)).cells.tolist()) == [
        0,
        1,
        2,
        3,
    ]


# Equal costs


def equal_factors_hold(seeds: range) -> tuple[int, bool]:
    """Number of factors marked equal to earlier ones in parts, before and after presolve, and whether all of
    them are equal.
    """
    alike, is_right = 0, True
    for seed in seeds:
        random, part = np.random.default_rng(seed), equal_layers(seed)
        is_left = [random.random(size) < 0.6 for size in part.sizes]
        left = presolve._part(
            part, [np.flatnonzero(mask) if mask.any() else np.array([0]) for mask in is_left]
        )
        for own in (part, left):
            for place, first in enumerate(own.first_equal):
                is_right = is_right and np.array_equal(own.factors[place].costs, own.factors[first].costs)
                alike += place != first
    return alike, is_right


def test_factors_marked_equal_are_equal_after_presolve() -> None:
    alike, is_right = equal_factors_hold(range(30))
    assert alike > 100 and is_right


def test_factors_wrongly_marked_equal_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        presolve, "first_occurrences", lambda kinds: first_occurrences(like for like, *_ in kinds)
    )
    assert not equal_factors_hold(range(30))[1]


def test_first_occurrences_are_the_first_indices_of_equal_values() -> None:
    assert first_occurrences("abcab") == (0, 1, 2, 0, 1)


def test_a_subset_of_weights_gives_the_same_sums() -> None:
    for seed in range(10):
        chain = chain_with_shared(seed)
        orders: list[list[EliminationOrder]] = orders_of(chain)
        weights = np.random.default_rng(seed).uniform(0.0, 1.0, (4, 5))
        rows = np.array([2, 0], dtype=np.intp)
        whole = chain_sums(chain, orders, ChainWeights.without_peaks(chain, weights))
        alone = chain_sums(chain, orders, ChainWeights.without_peaks(chain, weights[rows]))
        some = whole.some(rows)
        assert some.least == pytest.approx(alone.least)
        for one, other in zip([*some.prefix, *some.suffix], [*alone.prefix, *alone.suffix], strict=True):
            assert one == pytest.approx(other)
        for own, others in zip(some.factor_sums, alone.factor_sums, strict=True):
            for one_part, other_part in zip(own, others, strict=True):
                for factor_sums in (one_part, other_part):
                    factor_sums.distribute(np.zeros_like(factor_sums.last))
                for a, b in zip(one_part.min_marginals(), other_part.min_marginals(), strict=True):
                    assert a == pytest.approx(b)
