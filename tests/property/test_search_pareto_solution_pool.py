"""Solution pools: every solution recombined from a pool is found, with its correct costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.pareto_tuning import tune
from tests.property.pareto_instances import frontier_by_definition, long_chain, measure_of, plain
from tests.property.test_search_pareto_recombination import frontier_of, segments_of, short
from tests.sampling import sample_of

from shardwise.pareto import Chain, FactorGraph, shared_sizes
from shardwise.search.pareto import pareto_search, tuning, two_phase
from shardwise.search.pareto import recombination as pooling
from shardwise.search.pareto.labels import TooManyLabels
from shardwise.search.pareto.presolve import cases_of, choices_of
from shardwise.search.pareto.recombination import solution_pool
from shardwise.search.pareto.solution import SegmentChoice, Solution, occurrences
from shardwise.search.pareto.state import State

MANY = 3_000_000
"""Most combinations of choices of all segments of a chain that is enumerated."""


def seen_at_borders(chain: Chain, solutions: list[Solution]) -> list[set[int]]:
    """The choices at each border in any of some solutions; both ends of a repeated segment share theirs."""
    seen: list[set[int]] = [set() for _ in range(len(chain) + 1)]
    for solution in solutions:
        for place, choice in zip(occurrences(chain), solution, strict=True):
            part = chain[place].modes[choice.mode][1]
            for border, end in ((place, part.entry), (place + 1, part.exit)):
                if end is not None:
                    seen[border].add(choice.choices[end])
    for _ in chain:
        for place, segment in enumerate(chain):
            if segment.repeat > 1:
                seen[place] = seen[place + 1] = seen[place] | seen[place + 1]
    return seen


def inner_of(part: FactorGraph, choices: tuple[int, ...]) -> tuple[int, ...]:
    """The choices of the variables that are not in the separator."""
    return tuple(choice for variable, choice in enumerate(choices) if variable not in part.separator)


def recombinations_of(chain: Chain, solutions: list[Solution]) -> Iterator[Solution]:
    """All solutions of a chain whose segments are as somewhere in the pool, by definition: enumerates all
    choices of all variables.
    """
    seen = seen_at_borders(chain, solutions)
    shared: dict[str, set[int]] = {}
    inner_choices: list[set[tuple[int, tuple[int, ...]]]] = [set() for _ in chain]
    for solution in solutions:
        for place, choice in zip(occurrences(chain), solution, strict=True):
            part = chain[place].modes[choice.mode][1]
            inner_choices[place].add((choice.mode, inner_of(part, choice.choices)))
            for name, variable in part.shared:
                shared.setdefault(name, set()).add(choice.choices[variable])
    for chosen in product(*(sorted(values) for values in shared.values())):
        shared_choices = dict(zip(shared, chosen, strict=True))
        partial: list[tuple[int | None, Solution]] = [(None, ())]
        for place in occurrences(chain):
            onward = []
            for mode, (_, part) in enumerate(chain[place].modes):
                for choices in product(*(range(size) for size in part.sizes)):
                    if (mode, inner_of(part, choices)) not in inner_choices[place]:
                        continue
                    if any(choices[variable] != shared_choices[name] for name, variable in part.shared):
                        continue
                    entry = None if part.entry is None else choices[part.entry]
                    leaving = None if part.exit is None else choices[part.exit]
                    if entry is not None and entry not in seen[place]:
                        continue
                    if leaving is not None and leaving not in seen[place + 1]:
                        continue
                    onward += [
                        (leaving, (*before, SegmentChoice(mode, choices)))
                        for border, before in partial
                        if entry is None or border == entry
                    ]
            partial = onward
        yield from (solution for _, solution in partial)


def instances(seeds: Iterable[int]) -> list[tuple[Chain, list[Solution]]]:
    """Chains that have solutions and are not too large, with their fastest, smallest and middle solution."""
    found = []
    for seed in seeds:
        chain = short(seed)
        count = prod(sum(prod(part.sizes) for _, part in segment.modes) for segment in segments_of(chain))
        own = [solution for _, solution in pareto_search([chain]).solutions]
        if own and count * prod(shared_sizes(chain).values()) <= MANY:
            found.append((chain, [own[0], own[len(own) // 2], own[-1]]))
    return found


def has_all_recombinations(chain: Chain, solutions: list[Solution]) -> bool:
    """Whether the chain of the pool has the frontier of all recombined solutions, and its solutions map to
    solutions of the whole chain with these costs.
    """
    pool = solution_pool(chain, solutions)
    points = [measure_of(chain, plain(solution)) for solution in recombinations_of(chain, solutions)]
    expected = frontier_of([point for point in points if np.isfinite(point).all()])
    if frontier_by_definition(pool.chain) != expected:
        return False
    for point, (_, solution) in zip(expected, pareto_search([pool.chain]).solutions, strict=True):
        if measure_of(chain, plain(pool.original(solution))) != point:
            return False
    return True


@pytest.mark.parametrize("first", sample_of(range(0, 80, 10), (0, 10)))
def test_all_solutions_of_the_pool_are_found(first: int) -> None:
    """Small whole numbers, so that costs do not depend on the order of summation."""
    own = instances(range(first, first + 10))
    assert len(own) >= 3
    assert all(has_all_recombinations(chain, solutions) for chain, solutions in own)


def test_the_pool_has_fewer_choices_than_the_space_and_more_than_the_solutions() -> None:
    """In a long chain the segments of its extreme solutions combine into further ones, all valid."""
    more = 0
    for seed in range(10):
        chain = long_chain(seed)
        exact = pareto_search([chain])
        if len(exact.points) < 2:
            continue
        pool = solution_pool(chain, [exact.solutions[0][1], exact.solutions[-1][1]])
        found = pareto_search([pool.chain])
        for point, (_, solution) in zip(found.points, found.solutions, strict=True):
            own = measure_of(chain, plain(pool.original(solution)))
            assert own == pytest.approx(tuple(point), rel=1e-12)
            matching = exact.points[exact.points[:, 0] <= own[0] * (1.0 + 1e-9)]
            assert len(matching) and matching[:, 1].min() <= own[1] * (1.0 + 1e-9)
        more += len(found.points) > 2
    assert more >= 3


Values = npt.NDArray[np.float64]


def peaks_added(one: Values, other: Values) -> Values:
    """The mutant adds up temporaries, of which only the largest counts."""
    return one + other


def first_alone(one: Values, _: Values) -> Values:
    return one


BORDERS = pooling._borders


def first_border_choice_only(chain: Chain, among: Any) -> list[Any]:
    """The mutant sees only the first choice at every border."""
    return [seen[:1] for seen in BORDERS(chain, among)]


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_both", peaks_added), ("_both", first_alone), ("_borders", first_border_choice_only)],
)
def test_broken_pools_are_noticed(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = instances(range(20))
    monkeypatch.setattr(pooling, name, broken)
    assert not all(has_all_recombinations(chain, solutions) for chain, solutions in own)


def too_much(*_: object) -> None:
    raise TooManyLabels


@pytest.mark.slow
@pytest.mark.parametrize("few_choices", [0.9, 0.0])
def test_where_enumeration_fails_the_pool_is_searched(
    few_choices: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proven epsilon holds, and is smaller than without. Where the pool has nearly as many choices as the
    chain, pairs of solutions are recombined instead.
    """
    chains = [long_chain(seed) for seed in range(12)]
    exact = [pareto_search([chain]).points for chain in chains]
    monkeypatch.setattr(two_phase, "enumerate_gap", too_much)
    monkeypatch.setattr(two_phase, "eliminate_small_chain", lambda chain: None)
    tune(monkeypatch, pool_choices_share=few_choices)
    found = [pareto_search([chain], epsilon=0.01) for chain in chains]
    with monkeypatch.context() as without:
        without.setattr(two_phase, "_recombine", lambda state: None)
        without.setattr(two_phase, "recombine_neighbours", lambda state: None)
        before = [pareto_search([chain], epsilon=0.01).epsilon for chain in chains]
    for points, own in zip(exact, found, strict=True):
        for time_s, memory_bytes in points:
            ratios = np.maximum(own.points[:, 0] / time_s, own.points[:, 1] / memory_bytes)
            assert ratios.min() <= (1.0 + own.epsilon) * (1.0 + 1e-9)
    after = [own.epsilon for own in found]
    assert all(own <= whole * (1.0 + 1e-9) for own, whole in zip(after, before, strict=True))
    assert sum(after) < sum(before)


@pytest.mark.slow
@pytest.mark.parametrize("is_relaxed", [True, False])
def test_an_extreme_whose_enumeration_fails_is_not_tried_again(
    is_relaxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most once per extreme, whether or not tolerances are relaxed afterwards."""
    extremes: list[int] = []

    def counted(own: State, lower_bound: int, *_: object) -> None:
        if not own.lower_bounds.weights[lower_bound].all():
            extremes.append(int(own.lower_bounds.weights[lower_bound, 0] == 0.0))
        raise TooManyLabels

    monkeypatch.setattr(two_phase, "enumerate_gap", counted)
    monkeypatch.setattr(two_phase, "eliminate_small_chain", lambda chain: None)
    monkeypatch.setattr(two_phase, "_recombine", lambda state: None)
    seen = 0
    for seed in range(12):
        extremes.clear()
        pareto_search([long_chain(seed)], epsilon=0.001 if is_relaxed else 0.02)
        cases = len(cases_of(long_chain(seed)))
        assert extremes.count(0) <= cases and extremes.count(1) <= cases
        seen += len(extremes)
    assert seen > 3


@pytest.mark.slow
def test_nested_pools_terminate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool has fewer choices than the chain that it was made of."""
    counts: list[tuple[int, int]] = []
    assert tuning.TUNING.pool_choices_share < 1.0

    def counted(chain: Chain, solutions: Iterable[Solution]) -> pooling.SolutionPool:
        pool = solution_pool(chain, solutions)
        counts.append((choices_of(chain), choices_of(pool.chain)))
        return pool

    monkeypatch.setattr(two_phase, "enumerate_gap", too_much)
    monkeypatch.setattr(two_phase, "eliminate_small_chain", lambda chain: None)
    monkeypatch.setattr(two_phase, "solution_pool", counted)
    for seed in range(12):
        pareto_search([long_chain(seed)], epsilon=0.01)
    assert counts and all(after <= before for before, after in counts)
    assert any(after <= tuning.TUNING.pool_choices_share * before for before, after in counts)
