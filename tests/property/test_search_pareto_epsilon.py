"""Tolerances of dropped labels grow with their excess: no label exceeds its own, and together they stay
within their share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.pareto_tuning import tune
from tests.property.pareto_instances import chain_of, equal_layers, long_chain, without_peaks

from shardwise.pareto import FactorGraph
from shardwise.search.pareto import completion_bounds as bounds
from shardwise.search.pareto import dominance, elimination, labels
from shardwise.search.pareto.chain_labels import segment_labels
from shardwise.search.pareto.elimination_order import EliminationOrder, order_of
from shardwise.search.pareto.solution import part_costs
from shardwise.search.pareto.state import orders_of
from shardwise.search.pareto.weighted_sums import FactorSums, chain_sums, solutions

BASE, RATE = np.array([0.5, 0.5, 2.0, 1.0]), np.array([0.2, 0.2, 0.8, 0.4])


def exceeds_tolerance(seed: int) -> bool:
    """Whether some dropped label is beyond its tolerance of every label that stays."""
    random = np.random.default_rng(seed)
    points = random.uniform(0.0, 40.0, (400, 4))
    cells = np.sort(random.integers(0, 3, 400))
    own = dominance.EpsilonDominance(BASE, RATE, np.array([1.0, 0.0, 0.25, 0.0]), np.array([0.0, -5.0, 3.0]))
    undominated = dominance.reduced(cells, points, points.sum(axis=1), own)
    assert len(undominated) < 400
    assert (np.diff(cells[undominated]) >= 0).all()
    excess = np.maximum(points @ own.weights + own.potential[cells], 0.0)
    may_cost = points + BASE + RATE * excess[:, None]
    is_alike = cells[undominated][:, None] == cells[None]
    return not (is_alike & (points[undominated][:, None] <= may_cost[None]).all(axis=2)).any(axis=0).all()


def test_no_label_is_dropped_beyond_its_tolerance() -> None:
    assert not any(exceeds_tolerance(seed) for seed in range(40))


def test_steps_that_grow_too_fast_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dominance.EpsilonDominance, "growth", 8.0)
    assert any(exceeds_tolerance(seed) for seed in range(40))


def test_a_label_dropped_in_two_steps_stays_within_its_tolerance() -> None:
    """Labels are reduced in two halves and then together, as in joins: steps of coarse grids are steps of
    fine ones.
    """
    for seed in range(40):
        random = np.random.default_rng(seed)
        points = random.uniform(0.0, 40.0, (400, 4))
        cells = np.zeros(400, dtype=np.intp)
        own = dominance.EpsilonDominance(BASE, RATE, np.array([1.0, 0.0, 0.25, 0.0]), np.zeros(1))
        ranks = points.sum(axis=1)
        halves = [
            half[dominance.reduced(cells[half], points[half], ranks[half], own)]
            for half in (np.arange(200), np.arange(200, 400))
        ]
        left = np.concatenate(halves)
        left = left[dominance.reduced(cells[left], points[left], ranks[left], own)]
        may_cost = points + BASE + RATE * (points @ own.weights)[:, None]
        assert (points[left][:, None] <= may_cost[None]).all(axis=2).any(axis=0).all()


def excesses(seed: int) -> tuple[float, float]:
    """The sum of the excesses of a solution's labels, and the difference of its weighted sum from the least
    one.
    """
    chain = long_chain(seed)
    weights = np.array([[1.0, 0.0, 0.5, 0.0, 0.0], [0.3, 0.0, 1.0, 0.0, 0.0]])
    both = chain_sums(chain, orders_of(chain), without_peaks(chain, weights))
    own = chain_sums(chain, orders_of(chain), without_peaks(chain, weights[:1]))
    completion_bounds = bounds.CompletionBounds(own, 1e9, np.ones(4))
    other = solutions(both)[1]
    segments = [segment_labels(chain, orders_of(chain), place) for place in range(len(chain))]
    total = excess = 0.0
    at = [place for place, segment in enumerate(chain) for _ in range(segment.repeat)]
    for place, choice in zip(at, other, strict=True):
        table = segments[place].table
        row = segments[place].choices(np.arange(len(table))).index(choice)
        share = completion_bounds.in_segment(place)
        assert share is not None
        total += float(table.points[row] @ share.weights)
        excess += float(table.points[row] @ share.weights + share.potential[table.cells[row]])
    return excess, total - float(own.least[0])


@pytest.mark.parametrize("seed", range(20))
def test_excesses_of_a_solution_are_no_more_than_its_own(seed: int) -> None:
    excess, beyond = excesses(seed)
    assert -1e-9 <= excess <= beyond + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_tolerances_add_up_to_their_shares(seed: int) -> None:
    """Elimination and extensions together spend 0.35, segments 0.05: a large segment only shifts the split
    between the two. Extensions from both ends spend the same in total at any border where they meet.
    """
    chain = long_chain(seed)
    own = chain_sums(chain, orders_of(chain), without_peaks(chain, np.array([[1.0, 0.0, 0.5, 0.0, 0.0]])))
    completion_bounds = bounds.CompletionBounds(own, 1e9, np.ones(4))
    total, parts = 0.0, 0.0
    for place, segment in enumerate(chain):
        dominances = (
            completion_bounds.in_segment(place),
            completion_bounds.in_part(place, segment.modes[0][1]),
        )
        assert dominances[0] is not None and dominances[1] is not None
        total += segment.repeat * float(dominances[0].base[0] + dominances[1].base[0])
        parts += segment.repeat * float(dominances[1].base[0])
    largest = max(completion_bounds._weight(place) for place in range(len(chain)))
    assert parts == pytest.approx(max(0.05, 0.35 * largest))
    count = completion_bounds.occurrences

    def spent(border: int, after: int, end: int) -> float:
        own_dominance = completion_bounds.in_extension(border, after, end)[1]
        assert own_dominance is not None
        return float(own_dominance.base[0])

    for join_border in range(count + 1):
        prefix = sum(spent(border, border + 1, 0) for border in range(join_border))
        suffix = sum(spent(border, border - 1, count) for border in range(count, join_border, -1))
        slack = completion_bounds.in_final_join(join_border)[1]
        assert slack is not None and slack[1] == pytest.approx(2.0 * slack[0])
        assert total + prefix + suffix + float(slack[0]) == pytest.approx(0.4), join_border


def spent_in_a_part(seed: int) -> tuple[int, bool]:
    """Number of labels that elimination dropped from a random part, and whether each is matched by a label
    within the tolerance of its excess.
    """
    chain = chain_of(seed, operators=10, layouts=6)
    orders = orders_of(chain)
    left_out, is_matched = 0, True
    weights = np.array([[1.0, 0.0, 0.5, 0.0, 0.0]])
    whole = chain_sums(chain, orders, without_peaks(chain, weights))
    if not np.isfinite(whole.least).all():
        return 0, True
    for place, segment in enumerate(chain):
        for mode, (_, part) in enumerate(segment.modes):
            factor_sums = whole.factor_sums[place][mode]
            factor_sums.distribute(np.zeros((*factor_sums.last.shape[:-1], 1)))
            least = factor_sums.last[..., 0]
            potential = np.where(np.isfinite(least), -least, 0.0).reshape(-1)
            left, is_alike = spent(part, orders[place][mode], factor_sums, potential)
            left_out += left
            is_matched = is_matched and is_alike
    return left_out, is_matched


def spent(
    part: FactorGraph, order: EliminationOrder, factor_sums: FactorSums, potential: Any
) -> tuple[int, bool]:
    """Number of labels that elimination drops, and whether each is matched."""
    weights = factor_sums.weights[0]
    own = dominance.EpsilonDominance(0.1 * BASE, 5.0 * RATE, weights[[0, 1, 2, 4]], potential)
    exact = elimination.eliminated(part, order)
    lossy = elimination.eliminated(part, order, elimination.EliminationLimits(factor_sums, 1e9, own))
    excess = np.maximum(exact.points @ weights + potential[exact.cells], 0.0)
    tolerance = own.base + own.rate * excess[:, None]
    may_cost = exact.points + np.column_stack(
        [tolerance[:, :3], tolerance[:, 3] / 2.0, tolerance[:, 3] / 2.0]
    )
    is_alike = lossy.cells[:, None] == exact.cells[None]
    is_below = (lossy.points[:, None] <= may_cost[None] + 1e-9).all(axis=2)
    return len(exact) - len(lossy), bool((is_alike & is_below).any(axis=0).all())


def spent_in_equal_layers(seed: int) -> tuple[int, bool]:
    """The same for a part with equal layers."""
    part = equal_layers(seed)
    order = order_of(part)
    weights = np.array([[1.0, 0.0, 0.5, 0.0, 0.0]])
    factor_sums = FactorSums.of(part, order, weights)
    factor_sums.distribute(np.zeros((*factor_sums.last.shape[:-1], 1)))
    least = factor_sums.last[..., 0]
    return spent(part, order, factor_sums, np.where(np.isfinite(least), -least, 0.0).reshape(-1))


@pytest.mark.slow
def test_equal_tables_are_made_once_and_spend_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    joined = labels.joined

    def counted(*tables: Any, **options: Any) -> Any:
        made.append(1)
        return joined(*tables, **options)

    monkeypatch.setattr(elimination, "joined", counted)
    for seed in range(10):
        part = equal_layers(seed)
        order = order_of(part)
        factor_sums = FactorSums.of(part, order, np.array([[1.0, 0.0, 0.5, 0.0, 0.0]]))
        factor_sums.distribute(np.zeros((*factor_sums.last.shape[:-1], 1)))
        made.clear()
        plain = elimination.eliminated(part, order)
        apart = len(made)
        found = elimination.eliminated(part, order, elimination.EliminationLimits(factor_sums, 1e9))
        # Each of three layers has two dependent tables; those of two layers are copies.
        assert len(made) - apart == apart - 4
        ordered, expected = (each.points[np.lexsort((*each.points.T, each.cells))] for each in (found, plain))
        assert (found.cells == plain.cells).all() and ordered == pytest.approx(expected)
        for row in range(0, len(found), max(len(found) // 200, 1)):
            chosen = labels.chosen(found, np.array([row]))
            own = part_costs(part, tuple(int(chosen[variable][0]) for variable in range(len(part.sizes))))
            assert own == pytest.approx(found.points[row])
    tune(monkeypatch, tolerance_from_pairs=0)
    layered = [spent_in_equal_layers(seed) for seed in range(12)]
    assert sum(left_out for left_out, _ in layered) > 40
    assert all(is_matched for _, is_matched in layered)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["potentials", "paths"])
def test_tolerances_in_a_part_that_add_up_to_too_much_are_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """One mutant leaves the potential out of excesses; the other spends the whole tolerance in each step."""
    tune(monkeypatch, tolerance_from_pairs=0)
    if broken == "potentials":
        potentials = FactorSums.potentials

        def nothing(own: FactorSums, outside: Any) -> Any:
            found = potentials(own, outside)
            found.columns[:] = 0.0
            return found

        monkeypatch.setattr(FactorSums, "potentials", nothing)
    else:
        monkeypatch.setattr(elimination, "spendable", lambda share: 1.0)
        monkeypatch.setattr(elimination._LimitedSteps, "_spent_before", lambda own, step: 0.0)
    assert not all(spent_in_equal_layers(seed)[1] for seed in range(40))


@pytest.mark.slow
def test_elimination_within_a_part_spends_its_tolerance_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, tolerance_from_pairs=0)
    found = [spent_in_a_part(seed) for seed in range(30)]
    assert sum(left_out for left_out, _ in found) > 100
    assert all(is_matched for _, is_matched in found)
