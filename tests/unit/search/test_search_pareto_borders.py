"""The least memory of a chain is found where the bound of memory alone does not weigh all temporaries."""

from __future__ import annotations

import numpy as np
import pytest
from tests.pareto_tuning import tune

from shardwise.pareto import Chain, Factor, FactorGraph, Segment
from shardwise.search.pareto import supported_points
from shardwise.search.pareto.bound_sets import IncumbentSet
from shardwise.search.pareto.presolve import PresolvedChain
from shardwise.search.pareto.state import State


def cost(held_bytes: float, peak_bytes: float) -> list[float]:
    return [1.0, 0.0, held_bytes, 0.0, peak_bytes]


def chain() -> Chain:
    """Two operators. The first has a peak of 5 bytes with each choice, and the Lagrangian bound weighs this
    peak. The second has a peak of 9, of 4, or of 2 with one more resident byte.
    """
    first = Factor((0,), np.array([cost(1.0, 5.0), cost(2.0, 5.0)]))
    second = Factor((1,), np.array([cost(0.0, 9.0), cost(0.0, 4.0), cost(1.0, 2.0)]))
    return (Segment("one", (("kept", FactorGraph(("a", "b"), (2, 3), (first, second))),)),)


def smallest_bytes() -> float:
    state = State.of(0, chain(), PresolvedChain.of(chain()), IncumbentSet(), 0.0)
    supported_points.scalarise_extremes(state)
    assert state.lower_bounds.explored_sums[state.lower_bounds.weights[:, 0] == 0.0].max() == 6.0
    return float(state.incumbents.points[-1, 1])


def test_the_least_memory_is_found_without_enumeration() -> None:
    """The bound has 1 resident byte and a peak of 5, 6 in total, which the second operator reaches with its
    peak of 4. Without dual ascent the bound sees only that its first two choices have no resident bytes,
    and takes the first: 1 + 9.
    """
    assert smallest_bytes() == 6.0


def test_without_ascent_the_least_memory_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, memory_ascent_steps=0)
    assert smallest_bytes() == 10.0
