"""Bounds tightened to the least existing sum, and labels dropped that no completion makes useful: the search
finds the enumerated frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from tests.property.pareto_instances import (
    chain_of,
    chain_with_shared,
    frontier_by_definition,
    long_chain,
    measure_of,
    plain,
)
from tests.sampling import sample_of

from shardwise.pareto import Chain
from shardwise.search.pareto import (
    bound_sets,
    bound_tightening,
    completion_bounds,
    gap_enumeration,
    pareto_search,
    two_phase,
)
from shardwise.search.pareto.gap_enumeration import Tolerances
from shardwise.search.pareto.labels import Labels, TooManyLabels
from shardwise.search.pareto.presolve import memory_dualised
from shardwise.search.pareto.solution import measure
from shardwise.search.pareto.state import State
from shardwise.search.pareto.supported_points import scalarise_round

pytestmark = pytest.mark.usefixtures("by_two_phases")

CHUNKS = tuple(range(0, 300, 25))
OFTEN = CHUNKS[:1]
"""Chunks of seeds that a run without `--full` takes."""

WORTH_IT = bound_tightening._are_worth_it
COMPLETED, DUALISED, RAISE_TO = (
    completion_bounds.Completions.completed,
    completion_bounds.dualised_points,
    bound_sets.LagrangianBounds.raise_to,
)


@pytest.fixture(autouse=True)
def all_are_tightened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tighten all bounds, whatever the gains of the first ones and the share of hidden_s."""
    monkeypatch.setattr(bound_tightening, "_are_worth_it", lambda gains, working_epsilon: True)
    monkeypatch.setattr(gap_enumeration, "_counts_both_times", lambda share: True)


def agrees(chains: Iterable[Chain]) -> bool:
    """Whether the frontiers of all chains are found."""
    for chain in chains:
        expected = frontier_by_definition(chain)
        exact = pareto_search([chain])
        points = exact.points.tolist()
        if len(points) != len(expected) or not np.allclose(points, expected, rtol=1e-12, atol=0.0):
            return False
    return True


@pytest.mark.slow
def test_long_chains_and_shared_variables_are_found_too(full: bool) -> None:
    assert agrees(long_chain(seed) for seed in range(20 if full else 3))
    assert agrees(chain_with_shared(seed) for seed in range(60 if full else 10))


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.4])
def test_every_point_is_matched_within_epsilon(epsilon: float, full: bool) -> None:
    short, long = (50, 6) if full else (12, 2)
    chains = [chain_of(seed) for seed in range(short)] + [long_chain(seed) for seed in range(long)]
    for chain in chains:
        expected = frontier_by_definition(chain)
        if not expected:
            continue
        found = pareto_search([chain], epsilon=epsilon)
        assert found.epsilon <= epsilon * (1.0 + 1e-12)
        for (time_s, memory), (_, solution) in zip(found.points.tolist(), found.solutions, strict=True):
            assert measure_of(chain, plain(solution)) == pytest.approx((time_s, memory), rel=1e-12)
        limit = (1.0 + epsilon) * (1.0 + 1e-12)
        for time_s, memory in expected:
            assert any(a <= limit * time_s and b <= limit * memory for a, b in found.points.tolist())


@pytest.mark.parametrize("first", sample_of(CHUNKS, OFTEN))
def test_tightened_bounds_find_the_enumerated_frontier(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Labels are dropped and bounds rise in the chains of every run, so the comparison covers both."""
    left_out = bounds_that_rose = 0

    def completed(
        own: completion_bounds.Completions, table: Labels, border: int, *, is_prefix: bool
    ) -> Labels:
        nonlocal left_out
        found = COMPLETED(own, table, border, is_prefix=is_prefix)
        left_out += len(table) - len(found)
        return found

    def raise_to(own: bound_sets.LagrangianBounds, lower_bound: int, least: float) -> None:
        nonlocal bounds_that_rose
        bounds_that_rose += int(least > own.proven_sums[lower_bound] * (1.0 + 1e-9))
        RAISE_TO(own, lower_bound, least)

    monkeypatch.setattr(completion_bounds.Completions, "completed", completed)
    monkeypatch.setattr(bound_sets.LagrangianBounds, "raise_to", raise_to)
    assert agrees(chain_of(seed) for seed in range(first, first + CHUNKS[1]))
    if first in OFTEN:  # only these seeds surely drop many labels
        assert left_out > 30
        assert bounds_that_rose > 30


def test_dualised_memory_counts_as_time(full: bool) -> None:
    """For every point, time and dualised memory have the same weighted sum as before."""
    for seed in range(40 if full else 8):
        chain = chain_of(seed)
        for _, solution in pareto_search([chain]).solutions:
            time_s, memory = measure(chain, solution)
            other_s, peak = measure(memory_dualised(chain, 0.7), solution)
            assert other_s + 0.7 * peak == pytest.approx(time_s + 0.7 * memory, rel=1e-12)


def test_a_label_stays_where_some_completion_exists() -> None:
    """Compared with all pairs, and all triples, one by one."""
    random = np.random.default_rng(5)
    left = between = 0
    for _ in range(30):
        tables = [
            Labels(variables, sizes, np.sort(random.integers(0, int(np.prod(sizes)), 12)),
                   random.integers(0, 8, (12, 4)).astype(np.float64))
            for variables, sizes in (((1,), (3,)), ((1, 2), (3, 2)), ((2,), (2,)))
        ]  # fmt: skip
        prefix, table, suffix = tables
        own = completion_bounds.Completions({1: prefix}, {2: suffix, 1: table}, 0.5, 0.6, 14.75)
        every = [dualised_by_hand(each, 0.5) for each in tables]
        labels_left = own.completed(prefix, 1, is_prefix=True)
        is_completed = [
            any(table.cells[j] // 2 == cell and total(every[0][i], every[1][j]) < 14.75 for j in range(12))
            for i, cell in enumerate(prefix.cells.tolist())
        ]
        assert labels_left.points.tolist() == prefix.points[is_completed].tolist()
        left += len(labels_left)
        both = own.completed_between(table, 1, 2).tolist()
        assert both == [
            any(
                a == cell // 2 and b == cell % 2 and total(every[0][i], every[1][k], every[2][j]) < 14.75
                for i, a in enumerate(prefix.cells.tolist())
                for j, b in enumerate(suffix.cells.tolist())
            )
            for k, cell in enumerate(table.cells.tolist())
        ]
        between += sum(both)
    assert 30 < left < 330
    assert 30 < between < 330


def dualised_by_hand(table: Labels, rate: float) -> list[tuple[float, float, float]]:
    return [
        (a + rate * resident, b + rate * resident, rate * peak)
        for a, b, resident, peak in table.points.tolist()
    ]


def total(*summands: tuple[float, float, float]) -> float:
    return max(sum(each[0] for each in summands), sum(each[1] for each in summands)) + max(
        each[2] for each in summands
    )


def cutoff_too_low(
    own: completion_bounds.Completions, table: Labels, border: int, *, is_prefix: bool
) -> Labels:
    """The mutant also drops labels that come near the cutoff."""
    nearer = completion_bounds.Completions(own.prefix, own.suffix, own.rate, own.share, 0.9 * own.cutoff)
    return COMPLETED(nearer, table, border, is_prefix=is_prefix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (completion_bounds.Completions, "completed", cutoff_too_low),
        (completion_bounds, "dualised_points", lambda points, rate: DUALISED(points, 1.2 * rate)),
        (bound_sets.LagrangianBounds, "raise_to", lambda own, lower_bound, least: RAISE_TO(
            own, lower_bound, 1.05 * least)),
        (gap_enumeration, "memory_dualised", lambda chain, rate: memory_dualised(chain, 1.2 * rate)),
        (completion_bounds.Completions, "completed", lambda own, table, border, is_prefix: (
            table if is_prefix else cutoff_too_low(own, table, border, is_prefix=is_prefix))),
    ],
    ids=["cutoff", "dualised points", "multipliers", "memory", "suffixes alone"],
)  # fmt: skip
def test_a_broken_rule_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert not agrees(chain_of(seed) for seed in range(80))


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_round_stops_at_the_second_bound_that_fails(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Bounds are tightened by ascending weight of memory; here the second of a round fails, and every later
    one. The mutant treats a failure as a bound that did not rise.
    """
    own_tightened = bound_tightening._tightened
    rounds: list[list[float]] = []

    def counted(state: State, tried: set[float]) -> list[float]:
        rounds.append([])
        return scalarise_round(state, tried)

    def too_much_from_the_second(state: State, lower_bound: int, tolerances: Tolerances) -> None:
        if rounds:
            rounds[-1].append(float(state.lower_bounds.weights[lower_bound, 1]))
            if len(rounds[-1]) >= 2:
                raise TooManyLabels

    monkeypatch.setattr(bound_tightening, "scalarise_round", counted)
    monkeypatch.setattr(bound_tightening, "tighten", too_much_from_the_second)
    monkeypatch.setattr(two_phase, "_recombine", lambda state: None)  # a nested search with its own bounds
    if is_broken:
        monkeypatch.setattr(bound_tightening, "_tightened", lambda *given: own_tightened(*given) or 0.0)
    lengths = []
    for seed in range(12):
        rounds.clear()
        pareto_search([long_chain(seed)], epsilon=0.0)
        lengths += [len(weights) for weights in rounds]
        assert all(weights == sorted(weights) for weights in rounds)
    assert max(lengths) >= 3 and (max(lengths) > 3) == is_broken


@pytest.mark.parametrize(
    ("slopes", "rows"),
    [
        ([], []),
        ([3.0], [0]),
        # 1.04 and 1.0 count as equal, as do 1.06 and 1.09; 1.06 is more than 5 % above the first.
        ([1.06, 1.04, 1.0, 1.09], [0, 2]),
        ([1.0, 1.0, 2e-12, 2.2e-12, 2.09e-12], [0, 2, 3]),
    ],
)
def test_bounds_of_nearly_equal_slopes_are_tightened_once(slopes: list[float], rows: list[int]) -> None:
    assert bound_tightening.distinct_slopes(np.array(slopes)).tolist() == rows


@pytest.mark.parametrize(
    ("gains", "requested_epsilon", "are_worth_it"),
    [
        ([0.008], 0.001, False),  # ten epsilons are 1 %
        ([0.011, None], 0.001, True),
        ([0.011], 0.005, True),  # 1 % is less than ten epsilons
        ([0.034], 0.02, False),  # two epsilons are 4 %
        ([0.041], 0.02, True),
        ([1e-9], 0.0, True),
        ([None], 0.0, False),
        ([], 0.001, False),
    ],
)
def test_bounds_that_rise_far_are_worth_it(
    gains: list[float | None], requested_epsilon: float, are_worth_it: bool
) -> None:
    assert WORTH_IT(gains, requested_epsilon) == are_worth_it


@pytest.mark.slow
def test_gains_are_compared_with_the_requested_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains are not compared with the working epsilon, which is larger where tolerances were relaxed."""
    own = bound_tightening._tightened
    requested_epsilon: list[float] = []

    def seen(gains: object, far: float) -> bool:
        requested_epsilon.append(far)
        return False

    monkeypatch.setattr(bound_tightening, "_are_worth_it", seen)
    monkeypatch.setattr(
        bound_tightening, "_tightened", lambda state, *given: own(relaxed_tolerances(state), *given)
    )

    def relaxed_tolerances(state: State) -> State:
        state.working_epsilon = 16.0 * state.requested_epsilon
        return state

    for seed in range(6):
        pareto_search([long_chain(seed)], epsilon=0.01)
    search_epsilon = 1.01 / 1.001 - 1.0  # a tenth of the epsilon is for dropped points
    assert requested_epsilon and all(far == pytest.approx(search_epsilon) for far in requested_epsilon)
