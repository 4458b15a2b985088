"""Recombination of two solutions: each segment is as in one of them, and all such solutions are found."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.pareto_tuning import tune
from tests.property.pareto_instances import chain_with_shared, long_chain, measure_of, plain
from tests.sampling import sample_of

from shardwise.pareto import Chain, Factor, FactorGraph, Segment, non_dominated, shared_sizes
from shardwise.search.pareto import pareto_search, two_phase
from shardwise.search.pareto import recombination as mixing
from shardwise.search.pareto.gap_enumeration import enumerate_gap
from shardwise.search.pareto.labels import TooManyLabels
from shardwise.search.pareto.recombination import recombined
from shardwise.search.pareto.solution import SegmentChoice, Solution, occurrences

Point = tuple[float, float]


Pair = tuple[Solution, Solution]


def pairs_of(chains: Iterable[Chain]) -> list[tuple[Chain, Pair]]:
    """The chains that have solutions, with the fastest and the smallest of each."""
    found = [(chain, pareto_search([chain]).solutions) for chain in chains]
    return [(chain, (own[0][1], own[-1][1])) for chain, own in found if own]


def frontier_of(points: list[Point]) -> list[Point]:
    rows = np.array(points).reshape(-1, 2)
    return [(float(a), float(b)) for a, b in rows[non_dominated(rows)]]


def segments_of(chain: Chain) -> list[Segment]:
    return [chain[place] for place in occurrences(chain)]


def part_of(segment: Segment, choice: SegmentChoice) -> FactorGraph:
    return segment.modes[choice.mode][1]


def fits(chain: Chain, solution: Solution) -> bool:
    """Whether segments agree in their borders and in the shared variables."""
    shared: dict[str, int] = {}
    border: int | None = None
    for segment, choice in zip(segments_of(chain), solution, strict=True):
        part = part_of(segment, choice)
        if part.entry is not None and border is not None and choice.choices[part.entry] != border:
            return False
        border = None if part.exit is None else choice.choices[part.exit]
        for name, variable in part.shared:
            if shared.setdefault(name, choice.choices[variable]) != choice.choices[variable]:
                return False
    return True


def between(chain: Chain, pair: Pair) -> list[Point]:
    """The frontier of all recombinations of a pair, by definition: each segment as at some occurrence of it
    in one of the two, with any of their borders, and all shared variables as in one of the two.
    """
    segments = segments_of(chain)
    places = list(occurrences(chain))
    among = [
        list(dict.fromkeys(one[at] for one in pair for at, own in enumerate(places) if own == place))
        for place in range(len(chain))
    ]
    found = []
    for shared_choices in (_shared_of_pair(chain, one) for one in pair):
        for picked in product(*(among[place] for place in places)):
            for borders in product(*(_borders(chain, pair, at) for at in range(1, len(segments)))):
                solution = []
                for at, choice in enumerate(picked):
                    part, choices = part_of(segments[at], choice), list(choice.choices)
                    if part.entry is not None:
                        choices[part.entry] = borders[at - 1]
                    if part.exit is not None:
                        choices[part.exit] = borders[at]
                    for name, variable in part.shared:
                        choices[variable] = shared_choices[name]
                    solution.append(SegmentChoice(choice.mode, tuple(choices)))
                found.append(measure_of(chain, plain(tuple(solution))))
    return frontier_of([point for point in found if np.isfinite(point).all()])


def _shared_of_pair(chain: Chain, solution: Solution) -> dict[str, int]:
    return {
        name: choice.choices[variable]
        for segment, choice in zip(segments_of(chain), solution, strict=True)
        for name, variable in part_of(segment, choice).shared
    }


def _borders(chain: Chain, pair: Pair, border: int) -> list[int]:
    """The choices at a border in one of a pair; within a repeated segment and at its ends, those of all its
    borders.
    """
    places = list(occurrences(chain))
    before, after = places[border - 1], places[border]
    found: dict[int, None] = {}
    for one in pair:
        for place, choice in zip(places, one, strict=True):
            part = part_of(chain[place], choice)
            is_repeated = chain[place].repeat > 1
            if place == before and part.exit is not None:
                found[choice.choices[part.exit]] = None
            if place == after and part.entry is not None:
                found[choice.choices[part.entry]] = None
            if is_repeated and place in (before, after):
                found |= {choice.choices[end]: None for end in (part.entry, part.exit) if end is not None}
    return list(found)


def short(seed: int) -> Chain:
    """A chain whose segments occur at most twice, short enough to enumerate."""
    chain = chain_with_shared(seed)
    return tuple(Segment(segment.name, segment.modes, min(segment.repeat, 2)) for segment in chain)


@pytest.mark.parametrize("first", sample_of(range(0, 60, 10), (0, 10)))
def test_recombination_finds_all_combinations(first: int) -> None:
    pairs = pairs_of(short(seed) for seed in range(first, first + 10))
    assert len(pairs) >= 5
    for chain, pair in pairs:
        found = recombined(chain, pair)
        assert all(fits(chain, solution) for solution in found)
        points = frontier_of([measure_of(chain, plain(solution)) for solution in found])
        # Costs are whole numbers up to some hundreds, far apart compared with the steps.
        assert points == between(chain, pair)


def test_equal_segments_are_recombined_one_by_one() -> None:
    """Of seven equal segments with two choices each, any number can make either choice."""
    more = 0
    pairs = pairs_of(long_chain(seed) for seed in range(10))
    for chain, pair in pairs:
        found = recombined(chain, pair)
        assert all(fits(chain, solution) for solution in found)
        points = frontier_of([measure_of(chain, plain(solution)) for solution in found])
        exact = pareto_search([chain]).points
        for time_s, memory_bytes in points:  # nothing dominates the frontier
            matching = exact[exact[:, 0] <= time_s * (1.0 + 1e-9)]
            assert len(matching) and matching[:, 1].min() <= memory_bytes * (1.0 + 1e-9)
        more += len(points) > 2
    assert more >= 3


def test_options_beyond_the_limit_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer solutions, all of which fit; the costs of the pair itself are matched to about a step."""
    pairs = pairs_of(long_chain(seed) for seed in range(10))
    whole = [recombined(chain, pair) for chain, pair in pairs]
    tune(monkeypatch, most_options=4)
    some = [recombined(chain, pair) for chain, pair in pairs]
    for (chain, _), found in zip(pairs, some, strict=True):
        assert found and all(fits(chain, solution) for solution in found)
    assert sum(map(len, some)) < sum(map(len, whole))


def test_an_extreme_whose_bound_is_zero_is_found_at_once(
    by_two_phases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two temporaries exists whatever the choice, and the Lagrangian bound weighs one of them: it is
    0, and no factor of 0 reaches the incumbent.
    """
    calls: list[object] = []

    def counted(*given: Any) -> None:
        calls.append(given)
        enumerate_gap(*given)

    monkeypatch.setattr(two_phase, "enumerate_gap", counted)
    costs = np.zeros((2, 2, 5))
    costs[:, :, 0] = 1.0
    costs[0, 0, 4] = costs[1, 1, 4] = 10.0
    part = FactorGraph(("a",), (2,), (Factor((0,), costs[0]), Factor((0,), costs[1])))
    found = pareto_search([(Segment("one", (("kept", part),)),)], epsilon=0.001)
    assert found.points.tolist() == [[2.0, 10.0]] and found.epsilon == pytest.approx(0.001)
    assert len(calls) == 1


def test_mutants_that_skip_the_comparison_of_borders_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of(short(seed) for seed in range(20))
    monkeypatch.setattr(mixing, "_chosen", lambda rows, _: np.zeros(len(rows), dtype=np.intp))
    assert not all(fits(chain, solution) for chain, pair in pairs for solution in recombined(chain, pair))


def test_shared_variables_that_differ_between_segments_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of(short(seed) for seed in range(20))
    assert any(shared_sizes(chain) for chain, _ in pairs)
    variants = mixing._variants
    monkeypatch.setattr(
        mixing, "_variants",
        lambda part, rows, entries, exits, shared: variants(
            FactorGraph(part.names, part.sizes, part.factors, part.entry, part.exit), rows, entries, exits,
            shared
        ),
    )  # fmt: skip
    assert not all(fits(chain, solution) for chain, pair in pairs for solution in recombined(chain, pair))


@pytest.mark.slow
def test_where_enumeration_fails_recombined_solutions_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proven epsilon holds, and is smaller than without recombination."""

    def too_much(*_: object) -> None:
        raise TooManyLabels

    chains = [chain for chain, _ in pairs_of(long_chain(seed) for seed in range(12))]
    proven = []
    for is_recombined in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(two_phase, "enumerate_gap", too_much)
            patch.setattr(two_phase, "eliminate_small_chain", lambda chain: None)
            if not is_recombined:
                patch.setattr("shardwise.search.pareto.supported_points.recombined", lambda *_: [])
            own = [pareto_search([chain], epsilon=0.01) for chain in chains]
        proven.append([each.epsilon for each in own])
    for chain, epsilon, found in zip(chains, proven[1], own, strict=True):
        for time_s, memory_bytes in pareto_search([chain]).points:
            ratios = np.maximum(found.points[:, 0] / time_s, found.points[:, 1] / memory_bytes)
            assert ratios.min() <= (1.0 + epsilon) * (1.0 + 1e-9)
    assert all(after <= before * (1.0 + 1e-9) for before, after in zip(*proven, strict=True))
    assert sum(proven[1]) < sum(proven[0])
