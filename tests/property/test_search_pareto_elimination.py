"""Labels of a part are those by definition, with limits; and equal factors are recognised correctly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.pareto_tuning import tune
from tests.property.pareto_instances import (
    chain_of,
    chain_with_shared,
    complete_graph,
    equal_layers,
    without_peaks,
)
from tests.reference.pareto_joins import labels_by_definition

from shardwise.pareto import Factor, FactorGraph, first_occurrences
from shardwise.search.pareto import elimination, labels, presolve
from shardwise.search.pareto.elimination import EliminationLimits, eliminated
from shardwise.search.pareto.elimination_order import EliminationOrder, order_of
from shardwise.search.pareto.labels import Labels, TooManyLabels
from shardwise.search.pareto.solution import part_costs
from shardwise.search.pareto.state import orders_of
from shardwise.search.pareto.weighted_sums import FactorSums, chain_sums


def some_parts(seeds: range) -> Iterator[tuple[int, FactorGraph]]:
    """Parts of all shapes, some with equal layers."""
    for seed in seeds:
        chain = chain_of(seed, operators=8, layouts=4) if seed % 2 else chain_with_shared(seed)
        every = [part for segment in chain for _, part in segment.modes]
        layers = equal_layers(seed)
        if layers.sizes[0] > 2:  # 3^14 choices are too many for a definition
            layers = equal_layers(seed, layers=2)
        for part in [*every, layers, complete_graph(seed)]:
            if part.factors:
                yield seed, part


def limits_near(seed: int, part: FactorGraph) -> EliminationLimits:
    """Limits near the least sums of a part, under one to three random weights."""
    random = np.random.default_rng(seed)
    weights = random.uniform(0.0, 1.0, (int(random.integers(1, 4)), 5)).round(2)
    peak_shares = ((int(random.integers(len(part.factors))), 1.0),)
    factor_sums = FactorSums.of(part, order_of(part), weights, peak_shares)
    factor_sums.distribute(np.zeros_like(factor_sums.last))
    finite = factor_sums.last[np.isfinite(factor_sums.last).all(axis=-1)]
    near = float(random.uniform(1.0, 1.6))
    limit = float(finite.max(axis=1).min() * near) + 1.0 if len(finite) else 1.0
    return EliminationLimits(factor_sums, limit)


def contents(found: Labels, separator: tuple[int, ...]) -> dict[Any, Any]:
    """The costs of the labels of each choice of the separator."""
    at = found.coordinates()
    cells = zip(*(at[variable].tolist() for variable in separator), strict=True)
    every = cells if separator else iter([()] * len(found))
    costs: dict[Any, set[Any]] = {}
    for cell, point in zip(every, found.points.round(9).tolist(), strict=True):
        costs.setdefault(cell, set()).add(tuple(point))
    return costs


def agree(seeds: range) -> bool:
    """Whether the labels within the limits are those by definition."""
    for seed, part in some_parts(seeds):
        limits = limits_near(seed, part)
        found = eliminated(part, order_of(part), limits)
        expected = labels_by_definition(part, limits.factor_sums.weights, limits.limit)
        if contents(found, part.separator) != expected:
            return False
    return True


@pytest.mark.slow
def test_labels_are_those_by_definition(full: bool) -> None:
    assert agree(range(200 if full else 40))


@pytest.mark.slow
def test_the_choices_of_each_label_have_its_cost() -> None:
    checked = 0
    for seed, part in some_parts(range(20)):
        found = eliminated(part, order_of(part), limits_near(seed, part))
        for row in range(0, len(found), max(len(found) // 20, 1)):
            chosen = labels.chosen(found, np.array([row]))
            own = part_costs(part, tuple(int(chosen[variable][0]) for variable in range(len(part.sizes))))
            assert own == pytest.approx(found.points[row])
            checked += 1
    assert checked > 500


LEAST, WEIGHTS = elimination.EqualTables.least, elimination._LimitedSteps._weights


def own_outside_only(own: Any, sums: Any, table: int, onto: tuple[int, ...]) -> Any:
    """The mutant uses only the table's own outside sums, not those of equal tables."""
    return LEAST(replace(own, every={table: [table]}), sums, table, onto)


def whole_peak_everywhere(own: Any, share: float) -> Any:
    """The mutant weighs the whole peak in every table."""
    return WEIGHTS(own, 1.0)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (elimination.EqualTables, "least", own_outside_only),
        (elimination._LimitedSteps, "_weights", whole_peak_everywhere),
    ],
)
def test_a_broken_step_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any]
) -> None:
    assert agree(range(2))
    monkeypatch.setattr(owner, name, broken)
    assert not agree(range(30))


@pytest.mark.parametrize("limit", ["most_pairs_if_exact", "most_labels_if_exact"])
def test_too_many_labels_raise(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    tune(monkeypatch, **{limit: 1}, labels_per_cell=0)
    with pytest.raises(TooManyLabels):
        eliminated(complete_graph(0), order_of(complete_graph(0)), limits_near(0, complete_graph(0)))


def test_an_exit_without_costs_has_all_choices() -> None:
    """The entry costs 1 s or 2 s. The rest costs 5 s after the first choice of the exit and nothing after the
    second, so that of the limit of 4 s both entries are left for the second choice of the exit. With the
    least sum outside of choices in wrong order, the entry of 2 s is dropped.
    """
    costs = np.zeros((2, 5))
    costs[:, 0] = 1.0, 2.0
    part = FactorGraph(("a", "b"), (2, 2), (Factor((0,), costs),), entry=0, exit=1)
    factor_sums = FactorSums.of(part, order_of(part), np.array([[1.0, 0.0, 0.0, 0.0, 0.0]]))
    factor_sums.distribute(np.array([[5.0, 0.0], [0.0, 5.0]]).T[[0, 0]][..., None])
    found = eliminated(part, order_of(part), EliminationLimits(factor_sums, 4.0))
    at = found.coordinates()
    assert {(0, 1), (1, 1)} <= set(zip(at[0].tolist(), at[1].tolist(), strict=True))


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
        whole = chain_sums(chain, orders, without_peaks(chain, weights))
        alone = chain_sums(chain, orders, without_peaks(chain, weights[rows]))
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
