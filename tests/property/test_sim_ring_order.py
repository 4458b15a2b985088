"""The order of a ring is the best of all orders, also in the engine; and no order beats the bound."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest

from shardwise.cluster import Capacity
from shardwise.errors import InternalError
from shardwise.sim import simulate
from shardwise.sim.engine import TaskGraphBuilder
from shardwise.sim.ring_order import EXACT_CLASSES, Floats, _assignment_bound_s, ring_order


def random_hops(rng: random.Random, classes: int) -> Floats:
    """Some are equal, some pairs have no route between them, some take whole seconds (ties)."""
    low = rng.choice([0.0, 0.3])
    hops = [
        [
            float("inf") if rng.random() < low else rng.choice([1.0, 2.0, 3.0, rng.uniform(0.1, 9.0)])
            for _ in range(classes)
        ]
        for _ in range(classes)
    ]
    return np.array(hops)


def every_order(classes: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in permutations(range(1, classes))]


def cost(hops: Floats, order: tuple[int, ...]) -> tuple[float, float]:
    along = [hops[one, other] for one, other in zip(order, (*order[1:], order[0]), strict=True)]
    return max(along), sum(along)


def test_the_order_is_the_best_of_all(full: bool) -> None:
    rng = random.Random(41)
    impossible = 0
    for _ in range(2000 if full else 200):
        classes = rng.randint(2, 7)
        hops = random_hops(rng, classes)
        found = ring_order(hops)
        slowest_s, total_s = min(cost(hops, order) for order in every_order(classes))
        impossible += slowest_s == float("inf")
        assert sorted(found.order) == list(range(classes)) and found.order[0] == 0
        assert found.slowest_s == slowest_s == found.bound_s and found.is_optimal
        if slowest_s < float("inf"):
            assert found.total_s == pytest.approx(total_s, rel=1e-12)
    assert impossible > 0


def test_the_bound_is_below_every_order() -> None:
    """Also where the order is exact, so that both can be compared; the bound is often tight."""
    rng = random.Random(42)
    met = 0
    for _ in range(300):
        hops = random_hops(rng, rng.randint(3, 8))
        np.fill_diagonal(hops, np.inf)
        best_s, bound_s = ring_order(hops).slowest_s, _assignment_bound_s(hops)
        assert bound_s <= best_s
        met += bound_s == best_s
    assert met > 200


@pytest.mark.parametrize("classes", [EXACT_CLASSES + 1, 20])
def test_beyond_exact_search_the_gap_is_named(classes: int) -> None:
    rng = random.Random(classes)
    for _ in range(3):
        hops = random_hops(rng, classes)
        found = ring_order(hops)
        assert sorted(found.order) == list(range(classes))
        assert found.bound_s <= found.slowest_s
        assert found.is_optimal == (found.slowest_s == found.bound_s)


def test_a_hidden_ring_of_twelve_is_found() -> None:
    """Fast hops along one order only; all others are slow."""
    order = [0, 7, 3, 11, 5, 1, 9, 2, 10, 6, 4, 8]
    hops = np.full((12, 12), 5.0)
    for one, other in zip(order, [*order[1:], 0], strict=True):
        hops[one, other] = 1.0
    found = ring_order(hops)
    assert list(found.order) == order and found.slowest_s == 1.0 and found.total_s == 12.0


def test_the_engine_agrees_that_no_order_is_faster() -> None:
    """Five sites with a link for each pair and direction: a ring is one flow over all of its hops."""
    rng = random.Random(43)
    for _ in range(5):
        rates = np.array([[rng.uniform(1.0, 9.0) for _ in range(5)] for _ in range(5)])

        def ring_s(order: tuple[int, ...], rates: Floats = rates) -> float:
            builder = TaskGraphBuilder()
            links = [
                [builder.add_link(f"{a}>{b}", Capacity.constant(float(rates[a, b]))) for b in range(5)]
                for a in range(5)
            ]
            route = [links[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
            builder.add_flow("ring", 36.0, route)
            return simulate(builder.build()).makespan_s

        found = ring_order(36.0 / rates)
        assert ring_s(found.order) == pytest.approx(found.slowest_s, rel=1e-12)
        assert ring_s(found.order) == pytest.approx(min(map(ring_s, every_order(5))), rel=1e-12)


def test_an_invalid_table_of_hops_is_refused() -> None:
    assert ring_order([[3.0]]).order == (0,)
    with pytest.raises(InternalError, match="shape"):
        ring_order([[1.0, 2.0]])
    with pytest.raises(InternalError, match="negative or NaN time"):
        ring_order([[0.0, -1.0], [1.0, 0.0]])
