"""The Pareto search is exact: dynamic programming, elimination alone and the two-phase method find the
enumerated frontier. Within an epsilon, they match every point of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
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
    starting_with,
)

from shardwise.pareto import Chain, Factor, FactorGraph, Segment, non_dominated
from shardwise.pareto.frontier import frontier_of
from shardwise.search.pareto import (
    bound_sets,
    chain_labels,
    completion_bounds,
    dominance,
    elimination,
    gap_enumeration,
    joins_numba,
    labels,
    labels_numba,
    pareto_search,
    presolve,
    state,
    supported_points,
    tuning,
    two_phase,
    weighted_sums,
)
from shardwise.search.pareto.chain_labels import eliminate_small_chain
from shardwise.search.pareto.elimination_order import EliminationOrder, order_of
from shardwise.search.pareto.presolve import cases_of, without_columns
from shardwise.search.pareto.solution import Solution, measures
from shardwise.search.pareto.weighted_sums import FactorSums

pytestmark = pytest.mark.usefixtures("by_two_phases")

LONG = (0, 2, 4, 17, 33, 39, 52, 67, 73, 83, 93, 99)
"""Seeds of long chains that have solutions and repeat a segment at least four times."""

SOME_LONG = (2, 33, 83)
"""Some of these, for a run without `--full` where each is searched several times: one thinned by an epsilon,
one stopped by a limit on pairs, and one without either.
"""

OPERATORS = 9
"""Limit of `chain_of`, which makes chains with fewer operators: eight at most."""

INSTANCES, CHUNK = 600, 60
FULL_INSTANCES, FULL_CHUNK = 20_000, 400

Points = list[tuple[float, float]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        is_full = bool(metafunc.config.getoption("--full"))
        count, chunk = (FULL_INSTANCES, FULL_CHUNK) if is_full else (INSTANCES, CHUNK)
        metafunc.parametrize(("first_seed", "seeds"), [(first, chunk) for first in range(0, count, chunk)])


def orders_of(chain: Chain) -> list[list[EliminationOrder]]:
    return [[order_of(part) for _, part in segment.modes] for segment in chain]


def by_labels(
    chain: Chain, solve_chain: Callable[..., chain_labels.ChainFrontier]
) -> tuple[Points, list[Solution]]:
    """The frontier by dynamic programming without any bound."""
    orders = orders_of(chain)
    found = solve_chain(
        chain, [chain_labels.segment_labels(chain, orders, place) for place in range(len(chain))]
    )
    return as_points(found.points), found.solutions()


def as_points(values: Any) -> Points:
    return [(float(time_s), float(memory)) for time_s, memory in values]


@pytest.mark.slow
def test_all_search_methods_find_the_enumerated_frontier(first_seed: int, seeds: int) -> None:
    """Small chains are eliminated whole; one in six of them is also searched with bounds."""
    solvable = small = 0
    for seed in range(first_seed, first_seed + seeds):
        chain = chain_of(seed, operators=OPERATORS)
        expected = frontier_by_definition(chain)
        if not expected:
            continue
        solvable += 1
        ways = {
            "dynamic programming": by_labels(chain, chain_labels.chain_frontier),
            "elimination alone": by_labels(chain, chain_labels.merged),
        }
        once = eliminate_small_chain(chain)
        if once is not None:
            small += 1
            ways["at once"] = (as_points(once.points), once.solutions())
        if seed % 6 == 1 or once is None:
            exact = pareto_search([chain])
            ways["bounds first"] = (as_points(exact.points), [solution for _, solution in exact.solutions])
        for way, (points, solutions) in ways.items():
            assert points == expected, f"seed {seed}, {way}"
            assert [measure_of(chain, plain(each)) for each in solutions] == points, f"seed {seed}, {way}"
    # Of 600 chains at least 500 are compared, and in each part of the seeds the same share.
    assert solvable >= -(-seeds * 5 // 6) and small >= seeds * 3 // 4


def test_chains_of_up_to_eight_operators_are_compared() -> None:
    """Chains with solutions; operators of a segment, without its entry and exit."""
    largest = 0
    for seed in range(INSTANCES):
        for segment in chain_of(seed, operators=OPERATORS):
            for _, part in segment.modes:
                own = len(part.sizes) - (part.entry is not None) - (part.exit is not None)
                largest = max(largest, own)
    assert largest == 8


@pytest.mark.slow
@pytest.mark.parametrize("many", [0, tuning.TUNING.tolerance_from_pairs])
@pytest.mark.parametrize("epsilon", [0.1, 0.4])
def test_every_point_is_matched_within_epsilon(
    monkeypatch: pytest.MonkeyPatch, epsilon: float, many: int, full: bool
) -> None:
    tune(monkeypatch, tolerance_from_pairs=many)
    dropped = 0
    for seed in range(150 if full else 30):
        chain = chain_of(seed)
        expected = frontier_by_definition(chain)
        if not expected:
            continue
        found = pareto_search([chain], epsilon=epsilon)
        assert [measure_of(chain, plain(each)) for _, each in found.solutions] == as_points(found.points)
        limit = (1.0 + epsilon) * (1.0 + 1e-12)
        for time_s, memory in expected:
            assert any(a <= limit * time_s and b <= limit * memory for a, b in as_points(found.points)), seed
        dropped += len(expected) - len(found.points)
    assert dropped > 0


@pytest.mark.slow
def test_long_chains_are_searched_by_runs_of_equal_segments(full: bool) -> None:
    thinner, seeds = 0, LONG if full else SOME_LONG
    for seed in seeds:
        chain = long_chain(seed)
        expected = by_labels(chain, chain_labels.merged)[0]
        found = as_points(pareto_search([chain]).points)
        assert matches(found, expected, 0.0) and matches(expected, found, 0.0), seed
        for epsilon in (0.003, 0.05):
            close = pareto_search([chain], epsilon=epsilon)
            assert matches(close.points, expected, epsilon), (seed, epsilon)
            thinner += len(close.points) < len(expected)
    assert thinner > len(seeds) / 2


def matches(points: Any, expected: Points, epsilon: float) -> bool:
    """Whether each expected point has one that is within a factor 1 + epsilon of it."""
    limits = np.array(expected)[:, None] * (1.0 + epsilon) * (1.0 + 1e-12)
    return bool(np.all(np.any(np.all(np.asarray(points)[None] <= limits, axis=2), axis=1)))


def test_a_tolerance_that_is_spent_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tolerances a hundred times their share, some points are no longer matched."""
    for share in ("segments_share", "runs_share", "extension_share"):
        tune(monkeypatch, **{share: 100.0 * getattr(tuning.TUNING, share)})
    assert not epsilon_holds(0.05)


def epsilon_holds(epsilon: float) -> bool:
    """Whether every point of long chains is matched within the epsilon."""
    chains = [long_chain(seed) for seed in LONG]
    expected = [by_labels(chain, chain_labels.merged)[0] for chain in chains]
    return all(
        matches(pareto_search([chain], epsilon=epsilon).points, points, epsilon)
        for chain, points in zip(chains, expected, strict=True)
    )


@pytest.mark.slow
def test_shared_variables_make_one_choice_along_a_chain(full: bool) -> None:
    """By elimination alone, and within an epsilon; each shared variable has one choice in all segments of a
    solution.
    """
    seeds = range(80 if full else 20)
    assert agrees(seeds, chain_with_shared)
    shared = 0
    for seed in seeds:
        chain = chain_with_shared(seed)
        expected = frontier_by_definition(chain)
        if not expected:
            continue
        assert by_labels(chain, chain_labels.merged)[0] == expected, seed
        found = pareto_search([chain], epsilon=0.2)
        assert matches(found.points, expected, 0.2), seed
        assert [measure_of(chain, plain(each)) for _, each in found.solutions] == as_points(found.points)
        for _, solution in found.solutions:
            at = [place for place, segment in enumerate(chain) for _ in range(segment.repeat)]
            chosen = {
                (name, choice.choices[variable])
                for place, choice in zip(at, solution, strict=True)
                for name, variable in chain[place].modes[choice.mode][1].shared
            }
            assert len(chosen) == len({name for name, _ in chosen}), seed
            shared += len(chosen)
    assert shared > 2 * len(seeds)


def at_the_first(sums: Any, axes: list[int]) -> Any:
    """The mutant takes the first choice of a shared variable instead of the best one."""
    for axis in axes:
        sums = sums.take([0], axis=axis)
    return sums


def test_shared_variables_fixed_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighted_sums, "_without", at_the_first)
    assert not agrees(range(60), chain_with_shared)


def stopped(most_pairs: int, epsilon: float, seeds: Iterable[int]) -> tuple[int, bool]:
    """Number of long chains that were searched with a larger epsilon than requested under a limit on pairs of
    labels, and whether every solution is matched within the reported epsilon.
    """
    relaxed, are_matched = 0, True
    for seed in seeds:
        chain = long_chain(seed)
        expected = by_labels(chain, chain_labels.merged)[0]
        with pytest.MonkeyPatch.context() as patched:
            tune(patched, most_pairs_with_tolerance=most_pairs, most_pairs_if_exact=most_pairs)
            found = pareto_search([chain], epsilon=epsilon)
        are_matched &= matches(found.points, expected, found.epsilon)
        relaxed += found.epsilon > epsilon
    return relaxed, are_matched


@pytest.mark.slow
@pytest.mark.parametrize(("most_pairs", "epsilon"), [(20, 0.001), (60, 0.001), (40, 0.0)])
def test_a_search_over_its_limit_reports_its_proven_epsilon(
    most_pairs: int, epsilon: float, full: bool
) -> None:
    """Above the limit, enumerations use a relaxed tolerance as long as that helps."""
    relaxed, are_matched = stopped(most_pairs, epsilon, LONG if full else SOME_LONG)
    assert relaxed > (2 if full else 1) and are_matched


def relaxed_silently(own: state.State, tolerances: gap_enumeration.Tolerances) -> gap_enumeration.Tolerances:
    """The mutant relaxes tolerances of later enumerations without a report."""
    return TIMES(tolerances, 64.0) if 0.0 < own.working_epsilon < 0.1 else tolerances


@pytest.mark.slow
def test_relaxed_tolerances_that_are_not_reported_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_phase, "relaxed_tolerances", relaxed_silently)
    assert not all(stopped(60, 0.001, [seed])[1] for seed in starting_with(33, LONG))


TIMES = gap_enumeration.Tolerances.times


@pytest.mark.parametrize(
    ("working_epsilon", "after", "if_wide"),
    [
        (0.0, 0.0, 0.0),
        (0.0005, 0.004, 0.004),
        (0.0009, 0.0072, 0.0072),
        (0.0045, 0.015, 0.0075),
        (0.009, 0.015, 0.009),
        (0.011, 0.011, 0.011),
        (0.03, 0.03, 0.03),
    ],
)
def test_tolerances_are_relaxed_no_more_than_helps(
    working_epsilon: float, after: float, if_wide: float
) -> None:
    """Tolerances grow to 8 times, but at most to 1.5 %, or 0.75 % where no enumeration was tried. They stay
    where they would grow less than 1.5 times.
    """
    chain = long_chain(0)
    for enough, expected in (
        (tuning.TUNING.relaxed_epsilon, after),
        (tuning.TUNING.relaxed_epsilon_if_wide, if_wide),
    ):
        own = state.State.of(
            0, chain, presolve.PresolvedChain.of(chain), bound_sets.IncumbentSet(), working_epsilon
        )
        tolerances = gap_enumeration.relaxed_tolerances(
            own, gap_enumeration.Tolerances.of(working_epsilon, 0.0, 2.0, 3.0), enough
        )
        assert own.is_hard and own.working_epsilon == pytest.approx(expected)
        assert tolerances.relative == pytest.approx(expected)
        assert tolerances.labels[0] == pytest.approx(2.0 * expected)


@pytest.mark.slow
def test_cases_of_one_question_have_one_frontier(full: bool) -> None:
    used = set()
    for seed in range(0, 60 if full else 18, 3):
        cases = [chain_of(seed + case) for case in range(3)]
        points = [point for case in cases for point in frontier_by_definition(case)]
        best = frontier_of(np.array(points).reshape(-1, 2)).points
        found = pareto_search(cases)
        assert as_points(found.points) == as_points(best)
        measured = [measure_of(cases[case], plain(each)) for case, each in found.solutions]
        assert measured == as_points(best)
        used |= {case for case, _ in found.solutions}
    assert used == {0, 1, 2}


def fitting(seed: int, epsilon: float) -> bool:
    """Whether the points below a memory limit match the part of the frontier that fits, or are the smallest
    point where nothing fits.
    """
    chain = chain_of(seed)
    expected = frontier_by_definition(chain)
    for _, most in {*expected[:1], *expected[len(expected) // 2 :][:1], *expected[-1:]}:
        for limit in (most, most - 0.5):
            points = as_points(pareto_search([chain], epsilon=epsilon, most_bytes=limit).points)
            left = [point for point in expected if point[1] <= limit]
            sure = [point for point in left if point[1] * (1.0 + epsilon) <= limit]
            if sure and not (matches(points, sure, epsilon) and all(point[1] <= limit for point in points)):
                return False
            if not left and not (len(points) == 1 and points[0][1] <= most * (1.0 + epsilon)):
                return False
            if left and epsilon == 0.0 and points != left:
                return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_only_points_within_the_limit_are_found(epsilon: float, full: bool) -> None:
    assert all(fitting(seed, epsilon) for seed in range(30 if full else 3))


NADIR_POINTS = bound_sets.IncumbentSet.nadir_points


def nadir_points_too_low(own: bound_sets.IncumbentSet, epsilon: float) -> Any:
    """The mutant places local nadir points too low."""
    return NADIR_POINTS(own, epsilon) * np.where(np.isfinite(own.most_bytes), 0.8, 1.0)


def test_a_limit_that_is_taken_for_less_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_sets.IncumbentSet, "nadir_points", nadir_points_too_low)
    assert not all(fitting(seed, 0.0) for seed in range(60))


def test_modes_of_the_dominant_segment_are_cases() -> None:
    """Each case has one mode of the dominant segment, and all other choices; chains without such a segment
    are one case.
    """
    counts = []
    for seed in range(60):
        chain = chain_of(seed)
        found = cases_of(chain)
        many = [segment.repeat * max(len(part.sizes) for _, part in segment.modes) for segment in chain]
        modes = [len(segment.modes) for segment in chain]
        largest = int(np.argmax(many))
        is_most = 2 * many[largest] > sum(many) and chain[largest].repeat == 1
        assert len(found) == (modes[largest] if is_most else 1)
        for number, case in enumerate(found):
            left = [len(segment.modes) for segment in case.chain]
            assert left == [1 if is_most and place == largest else own for place, own in enumerate(modes)]
            assert not is_most or case.modes[largest] == (number,)
        counts.append(len(found))
    assert 10 < counts.count(2) < 50


def agrees(seeds: Iterable[int], make_chain: Callable[[int], Chain] = chain_of) -> bool:
    """Whether the search with bounds and without agrees with enumeration on all seeds."""
    for seed in seeds:
        chain = make_chain(seed)
        expected = frontier_by_definition(chain)
        if not expected:
            continue
        if (
            as_points(pareto_search([chain]).points) != expected
            or by_labels(chain, chain_labels.chain_frontier)[0] != expected
        ):
            return False
    return True


JOINED, TERMINAL, ARRAYS = labels_numba.joined_sides, joins_numba.terminal_pairs, labels._pruning_arrays


def adding_peaks(one: Any, other: Any, *rest: Any) -> Any:
    """The mutant adds up the peaks of parallel tables instead of taking the larger one."""
    count, pairs, rows, points = JOINED(one, other, *rest)
    for (side, _, order), own in zip((one, other), rows[:2], strict=True):
        points[:, -1] += side.points[np.argsort(order)[own], -1]
    return count, pairs, rows, points


def without_peak(a: Any, b: Any, choices: int, arrays: Any, *rest: Any) -> Any:
    """The mutant ignores the largest temporary where prefix and suffix meet."""
    a, b = (side._replace(points=side.points * [1.0, 1.0, 1.0, 0.0]) for side in (a, b))
    return TERMINAL(a, b, choices, arrays._replace(peaks=np.zeros_like(arrays.peaks)), *rest)


def ignoring_the_last_column(points: Any, groups: Any = None, epsilon: float = 0.0) -> Any:
    """The mutant ignores the last column in dominance."""

    return non_dominated(points[:, :-1], groups=groups, epsilon=epsilon)


MAY_MATTER = presolve.may_matter


def bounds_too_high(bounds: Any, nadir_sums: Any) -> Any:
    """The mutant takes bounds for a tenth more than they are."""
    return MAY_MATTER(bounds * 1.1, nadir_sums)


def without_exposed(chain: Chain) -> Chain:
    """The mutant leaves out the exposed time even where it decides."""
    return without_columns(chain, 1)


WEIGHTED = bound_sets.weighted


LEAST, WITHIN, OUTSIDE = (
    elimination.EqualTables.least,
    completion_bounds.CompletionBounds._pruning,
    completion_bounds.LeastPeaks.outside,
)


def completion_bounds_too_high(
    own: completion_bounds.CompletionBounds, spans: tuple[range, range], outside: Any, least: Any
) -> labels.LabelPruning:
    """The mutant takes completion bounds for a tenth more than they are."""
    return WITHIN(own, spans, 1.1 * outside, least)


WITH_OTHERS, BELOW = gap_enumeration.MultiplierSet.with_others, gap_enumeration.MultiplierSet.below


def smaller_boxes(
    own: gap_enumeration.MultiplierSet, weights: Any, share: float, parts: Any, cutoff: float
) -> gap_enumeration.MultiplierSet:
    """The mutant makes explored boxes, and all other multipliers, a tenth smaller."""
    return BELOW(own, weights, share, parts, 0.9 * cutoff)


def with_more_peak(
    own: gap_enumeration.MultiplierSet, near: Any, offsets: Any
) -> gap_enumeration.MultiplierSet:
    """The mutant weighs the peak of a single segment more than the largest peak."""
    found = WITH_OTHERS(own, near, offsets)
    more = np.where(np.arange(len(found.shares)) > 0, 1.5, 1.0)[:, None]
    return replace(found, peaks=more * found.peaks)


def with_both_times(
    own: gap_enumeration.MultiplierSet, near: Any, offsets: Any
) -> gap_enumeration.MultiplierSet:
    """The mutant counts half of the exposed time in addition to all of the hidden time."""
    found = WITH_OTHERS(own, near, offsets)
    more = np.where(np.arange(len(found.shares)) > 0, 1.5, 1.0)
    return replace(found, shares=more * found.shares)


def one_multiplier_too_high(*arguments: Any) -> Any:
    """The mutant takes the completion bounds of all multipliers but the first for a tenth more than
    they are.
    """
    arrays = ARRAYS(*arguments)
    more = np.where(np.arange(arrays.outside.shape[1]) > 0, 1.1, 1.0)
    return arrays._replace(outside=arrays.outside * more)


@pytest.mark.parametrize(
    ("module", "name", "broken", "seed"),
    [
        (gap_enumeration.MultiplierSet, "with_others", with_more_peak, 0),
        (gap_enumeration.MultiplierSet, "with_others", with_both_times, 137),
        (gap_enumeration.MultiplierSet, "below", smaller_boxes, 0),
        (labels, "_pruning_arrays", one_multiplier_too_high, 4),
        (labels_numba, "joined_sides", adding_peaks, 0),
        (joins_numba, "terminal_pairs", without_peak, 0),
        (dominance, "non_dominated", ignoring_the_last_column, 0),
        (presolve, "may_matter", bounds_too_high, 0),
        (elimination.EqualTables, "least", lambda *arguments: 1.1 * LEAST(*arguments), 0),
        (completion_bounds.CompletionBounds, "_pruning", completion_bounds_too_high, 4),
        (completion_bounds.LeastPeaks, "outside", lambda least, spans: 1.1 * OUTSIDE(least, spans), 0),
        (state, "without_idle_columns", without_exposed, 0),
        (two_phase, "cases_of", lambda chain: cases_of(chain)[:1], 21),
    ],
)
def test_a_broken_rule_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any], seed: int
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert not agrees(starting_with(seed, range(150)))


def test_every_multiplier_gives_a_lower_bound() -> None:
    """Long chains with repeated segments; the largest bound often belongs to another multiplier than the
    first.
    """
    others = 0
    for seed in LONG:
        chain = long_chain(seed)
        own = state.State.of(0, chain, presolve.PresolvedChain.of(chain), bound_sets.IncumbentSet(), 0.0)
        weights, parts = (
            np.array([1.0, 0.7]),
            np.full(len(chain), 1.0 / sum(segment.repeat for segment in chain)),
        )
        every = gap_enumeration.MultiplierSet.of_bound(weights, 0.4, parts, 1.0).with_others(own.presolved)
        sums = every.of(own, own.presolved).chain_weights
        assert len(every.shares) > 1
        for solution in by_labels(chain, chain_labels.merged)[1]:
            peaks, costs = own.peaks_of(solution), own.costs(solution)
            repeats = np.array([segment.repeat for segment in chain])
            sums_by_multiplier = costs[:3] @ sums.weights[:, :3].T + sums.weights[:, 4] * (
                (repeats * peaks) @ sums.peaks
            )
            assert (sums_by_multiplier <= weights @ measures(costs) * (1.0 + 1e-12)).all(), seed
            others += int(sums_by_multiplier.argmax() > 0)
    assert others > 50


def test_an_explored_box_closes_no_nadir_point_outside() -> None:
    """A bound t + m >= 4 was explored up to 10 for t < 4: (3, 6) sums to 9; (3, 8) sums to 11; at (6, 3),
    whose sum is 9, only t < 4 was explored.
    """
    own = bound_sets.LagrangianBounds()
    own.add(np.array([[1.0, 1.0]]), np.ones(1), np.zeros((1, 1)), np.array([4.0]))
    nadir_points = np.array([[3.0, 6.0], [3.0, 8.0], [6.0, 3.0], [2.0, 1.0]])
    assert bound_sets.is_open(own, nadir_points).tolist() == [True, True, True, False]
    own.mark_explored(0, 10.0, np.array([4.0, 9.0]))
    assert bound_sets.is_open(own, nadir_points).tolist() == [False, True, True, False]
    own.mark_explored(0, 10.0, np.array([np.inf, np.inf]))
    assert bound_sets.is_open(own, nadir_points).tolist() == [False, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("lowered", [1.0, 0.8])
def test_reduced_cost_fixing_drops_only_choices_below_no_nadir_point(
    monkeypatch: pytest.MonkeyPatch, lowered: float, full: bool
) -> None:
    """Presolve from the first bounds on; nadir points that are a fifth too low drop too many choices."""
    tune(monkeypatch, first_scalarisation_rounds=0)
    monkeypatch.setattr(
        state, "weighted", lambda weights, nadir_points: lowered * WEIGHTED(weights, nadir_points)
    )
    assert agrees(range(60 if full or lowered < 1.0 else 15)) == (lowered == 1.0)


def test_the_hull_has_the_points_that_weighted_sums_find() -> None:
    random = np.random.default_rng(3)
    for count in (1, 2, 3, 40):
        points = frontier_of(random.uniform(1.0, 2.0, (count, 2))).points
        hull = supported_points._hull(points)
        least = {int((points @ [1.0, slope]).argmin()) for slope in np.geomspace(1e-4, 1e4, 20_000)}
        assert least <= set(hull)
        chosen = points[hull]
        rise = np.diff(chosen[:, 0]) / -np.diff(chosen[:, 1])
        assert (np.diff(rise) > 0.0).all()


def test_the_order_of_elimination_takes_leaves_before_nodes_and_nodes_before_branches() -> None:
    rules = {step.rule for seed in range(100) for segment in chain_of(seed) for _, part in segment.modes
             for step in order_of(part).steps}  # fmt: skip
    assert rules == {"edge", "leaf", "node", "branch"}


def test_a_variable_with_many_neighbours_is_eliminated_last_where_nothing_is_chosen() -> None:
    """On one device every table is a single number: a tensor may have more readers than an array may have
    axes.
    """
    costs = np.ones((1, 1, 5))
    spokes = tuple(Factor((0, spoke), spoke * costs) for spoke in range(1, 81))
    part = FactorGraph(tuple(map(str, range(81))), (1,) * 81, spokes)
    assert max(len(step.variables) for step in order_of(part).steps) == 1
    [point] = pareto_search([(Segment("hub", (("kept", part),)),)]).points
    assert point.tolist() == [81 * 40, 81 * 40 + 81 * 40 + 80]


def test_equal_tables_are_computed_once() -> None:
    """Layers that all read one tensor share one table for each equal part; layers that differ in one number
    share the parts before it.
    """
    random = np.random.default_rng(3)
    pair, other = random.random((2, 3, 3, 5))

    def many(changed: int) -> tuple[FactorSums, int]:
        factors = []
        for layer in range(6):
            own = other if layer < changed else pair
            factors += [Factor((0, 2 * layer + 1), own), Factor((2 * layer + 1, 2 * layer + 2), pair)]
        part = FactorGraph(tuple(map(str, range(13))), (3,) * 13, tuple(factors), exit=0)
        found = FactorSums.of(part, order_of(part), np.ones((2, 5)))
        return found, len({first for first in found.first.tolist() if first >= len(factors)})

    (alike, few), (unlike, more) = many(0), many(3)
    # Of 17 steps: the last of a layer, its first, and the sums of two to six layers.
    assert (few, more) == (7, 8)
    summed, others = pair[..., :4].sum(-1), other[..., :4].sum(-1)  # peaks count at one factor alone
    layers = [(each + summed.min(1)).min(1) for each in (summed, others)]
    assert alike.last[:, 0] == pytest.approx(6 * layers[0])
    assert unlike.last[:, 0] == pytest.approx(3 * layers[0] + 3 * layers[1])


def test_repetitions_are_solved_once_and_counted_each() -> None:
    # Two equal segments of one operator each between a first and a last; the second costs (2, 0, 3, 0, 1) or
    # (1, 0, 5, 0, 1) in each: 2 segments reach (4, 6), (3, 8), (2, 10), plus the larger peak 1.
    from shardwise.pareto import FactorGraph, Segment

    nothing = np.zeros((1, 5))
    costs = np.array([[2.0, 0.0, 3.0, 0.0, 1.0], [1.0, 0.0, 5.0, 0.0, 1.0]])
    first = FactorGraph(("x",), (1,), (Factor((0,), nothing),), None, 0)
    middle = FactorGraph(("in", "op", "out"), (1, 2, 1), (Factor((1,), costs), Factor((2,), nothing)), 0, 2)
    last = FactorGraph(("x", "loss"), (1, 1), (Factor((1,), nothing),), 0, None)
    chain = (
        Segment("first", (("keep", first),)),
        Segment("blocks", (("keep", middle),), repeat=2),
        Segment("last", (("keep", last),)),
    )
    assert as_points(pareto_search([chain]).points) == [(2.0, 11.0), (3.0, 9.0), (4.0, 7.0)]


def test_choices_of_a_part_used_for_the_whole_chain_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant gives another frontier, or a choice that the whole chain does not have."""
    monkeypatch.setattr(presolve.PresolvedChain, "_original", lambda self, place, choice: choice)
    try:
        is_noticed = not agrees(starting_with(2, range(60)))
    except IndexError:
        is_noticed = True
    assert is_noticed


@pytest.mark.slow
def test_peaks_of_segments_that_add_up_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "joined_all", lambda summands: summands.sum(axis=0))
    assert not agrees(range(150))
