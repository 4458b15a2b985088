"""Small chains are eliminated whole: the result, and the limits at which that stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.pareto_tuning import tune
from tests.property.pareto_instances import (
    chain_of,
    chain_with_shared,
    frontier_by_definition,
    long_chain,
    measure_of,
    plain,
)

from shardwise.search.pareto import chain_labels, pareto_search, two_phase
from shardwise.search.pareto.bound_sets import representatives
from shardwise.search.pareto.labels import Allowance, Labels, TooManyLabels, joined

SEEDS = range(40)


def points_of(found: Any) -> list[tuple[float, float]]:
    return [(float(time_s), float(memory)) for time_s, memory in found.points]


@pytest.mark.slow
def test_small_chains_are_exact_whatever_the_epsilon() -> None:
    """Solutions have the costs of their points, and an epsilon drops only points that others match; several
    chains make one search.
    """
    fewer = 0
    for seed in SEEDS:
        chains = [chain_of(seed), chain_with_shared(seed)]
        assert all(chain_labels.eliminate_small_chain(chain) is not None for chain in chains)
        both = [frontier_by_definition(chain) for chain in chains]
        if not all(both):
            continue
        expected = [
            point
            for point in sorted({*both[0], *both[1]})
            if not any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in both[0] + both[1])
        ]
        exact = pareto_search(chains)
        assert points_of(exact) == expected
        assert [measure_of(chains[case], plain(each)) for case, each in exact.solutions] == expected
        assert exact.epsilon == 0.0 and all(effort.weights == 0 for effort in exact.efforts)
        close = pareto_search(chains, epsilon=0.2)
        assert close.epsilon == 0.2
        assert len(close.points) == len(representatives(np.array(expected), 0.2))
        limit = 1.2 * (1.0 + 1e-12)
        assert all(any(c <= limit * a and d <= limit * b for c, d in points_of(close)) for a, b in expected)
        fewer += len(close.points) < len(expected)
    assert fewer > 5


@pytest.mark.slow
def test_large_and_small_chains_are_searched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains of one search, the second by the two-phase method: the answer equals that of eliminating
    both whole.
    """
    tried = 0
    for seed in SEEDS:
        chains = [chain_of(seed), chain_of(seed + 1000)]
        small = pareto_search(chains)
        with monkeypatch.context() as patched:
            first = chains[0]
            patched.setattr(
                two_phase,
                "eliminate_small_chain",
                lambda c, first=first: chain_labels.eliminate_small_chain(c) if c is first else None,
            )
            found_both = pareto_search(chains)
        assert points_of(found_both) == points_of(small)
        tried += found_both.efforts[0].weights == 0 < found_both.efforts[1].weights
    assert tried > len(SEEDS) / 2


@pytest.mark.slow
def test_only_points_that_fit_are_returned() -> None:
    """The part of the frontier within the limit; if nothing fits, the smallest point."""
    for seed in SEEDS:
        expected = frontier_by_definition(chain_of(seed))
        if len(expected) < 3:
            continue
        limit = expected[1][1]
        assert points_of(pareto_search([chain_of(seed)], most_bytes=limit)) == expected[1:]
        smallest = expected[-1]
        assert points_of(pareto_search([chain_of(seed)], most_bytes=smallest[1] / 2.0)) == [smallest]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "few"), [("small_chain_costs", 65), ("small_chain_pairs", 100), ("small_chain_labels", 47)]
)
def test_joint_search_stops_at_its_limits(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of costs, pairs of labels, or labels in a table; the answer stays the same."""
    chain = long_chain(39)
    found = chain_labels.eliminate_small_chain(chain)
    assert found is not None and len(found.points) > 2
    exact = points_of(pareto_search([chain]))
    tune(monkeypatch, **{name: few})
    assert chain_labels.eliminate_small_chain(chain) is None
    by_two_phases = pareto_search([chain])
    assert by_two_phases.efforts[0].weights > 0
    np.testing.assert_allclose(by_two_phases.points, exact, rtol=1e-12)


def test_a_join_counts_the_compatible_pairs() -> None:
    """Three labels with choices 0, 0, 1 are compatible with two with choices 0 and 1: 2 + 1 pairs."""
    a = Labels(
        (0,), (2,), np.array([0, 0, 1]), np.array([[1.0, 1, 5, 0, 0], [5, 5, 1, 0, 0], [1, 1, 1, 0, 0]])
    )
    b = Labels((0,), (2,), np.array([0, 1]), np.array([[1.0, 1, 1, 0, 0], [2, 2, 2, 0, 0]]))
    allowance = Allowance(pairs=5, labels=9)
    found = joined(a, b, allowance=allowance)
    assert found.points.tolist() == [[2, 2, 6, 0, 0], [6, 6, 2, 0, 0], [3, 3, 3, 0, 0]]
    assert allowance.pairs == 2
    with pytest.raises(TooManyLabels):
        joined(a, b, allowance=allowance)
    with pytest.raises(TooManyLabels):
        joined(a, b, allowance=Allowance(pairs=9, labels=2))


def test_a_join_stops_above_its_labels() -> None:
    """All of 40 labels stay, of one cell or of four, and as many are allowed, or one less."""
    steps = np.arange(40.0)
    points = np.stack([steps, steps, 40.0 - steps, 0.0 * steps, 0.0 * steps], axis=1)
    one = Labels((0,), (1,), np.zeros(1, dtype=np.intp), np.zeros((1, 5)))
    for cells in (1, 4):
        many = Labels((0, 1), (1, cells), np.sort(np.arange(40) % cells), points)
        with pytest.raises(TooManyLabels):
            joined(many, one, allowance=Allowance(pairs=100, labels=39))
        assert len(joined(many, one, allowance=Allowance(pairs=100, labels=40))) == 40
