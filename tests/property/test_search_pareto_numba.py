"""Compiled code finds what NumPy finds pair by pair; with a tolerance, no label is dropped beyond it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import config, event
from tests.pareto_tuning import tune
from tests.property.pareto_instances import (
    chain_of,
    chain_with_shared,
    complete_graph,
    equal_layers,
    long_chain,
    starting_with,
)
from tests.property.test_search_pareto import LONG, SOME_LONG, agrees, by_labels, matches
from tests.reference import pareto_joins
from tests.reference.pareto_sums import ReferenceSums

from shardwise.errors import ConfigError
from shardwise.pareto import non_dominated
from shardwise.search.pareto import (
    chain_labels,
    compilation,
    completion_bounds,
    dominance,
    joins_numba,
    labels,
    labels_numba,
    pareto_search,
    weighted_sums_numba,
)
from shardwise.search.pareto.elimination_order import order_of
from shardwise.search.pareto.labels import LabelPruning, Labels, TerminalJoin, joined
from shardwise.search.pareto.solution import measures
from shardwise.search.pareto.weighted_sums import FactorSums

pytestmark = pytest.mark.usefixtures("by_two_phases")


def table(
    random: np.random.Generator, variables: tuple[int, ...], sizes: tuple[int, ...], columns: int
) -> Labels:
    """Labels with small whole numbers, so that many are equal, in some of the cells."""
    count = int(random.integers(1, 60))
    cells = np.sort(random.integers(0, int(np.prod(sizes)), count))
    return Labels(variables, sizes, cells, random.integers(0, 6, (count, columns)).astype(float))


def random_join(seed: int) -> tuple[Labels, Labels, int | None, LabelPruning | None]:
    """Two tables with some common variables, one of which may be eliminated; half of the pairs have a cutoff
    under one to three multipliers.
    """
    random = np.random.default_rng(seed)
    size_of = dict(enumerate(random.integers(1, 4, 4).tolist()))
    columns = int(random.integers(4, 6))
    both = []
    for _ in range(2):
        variables = tuple(sorted(random.choice(4, int(random.integers(1, 4)), replace=False).tolist()))
        both.append(table(random, variables, tuple(size_of[v] for v in variables), columns))
    a, b = both
    shared = sorted({*a.variables} & {*b.variables})
    without = int(random.choice(shared)) if shared and random.random() < 0.8 else None
    if random.random() < 0.5:
        return a, b, without, None
    left = tuple(size_of[v] for v in sorted({*a.variables, *b.variables} - {without}))
    multipliers = int(random.integers(1, 4))
    weights = random.integers(0, 3, (columns, multipliers)).astype(float)
    own, other = weights.copy(), weights.copy()
    other[-1] = 0.0
    outside = random.integers(0, 9, (*left, multipliers)).astype(float)
    outside[random.random(left) < 0.1] = np.inf
    peaks = random.integers(0, 6, left).astype(float) if random.random() < 0.5 else None
    return a, b, without, LabelPruning(own, other, weights, outside, float(random.integers(8, 40)), peaks)


def contents(found: Labels) -> list[tuple[int, ...]]:
    assert (np.diff(found.cells) >= 0).all()
    (a, rows_a), (b, rows_b) = found.origins
    points = a.points[rows_a] + b.points[rows_b]
    assert (points[:, :-1] == found.points[:, :-1]).all()
    return sorted(zip(found.cells.tolist(), *found.points.T.tolist(), strict=True))


def test_joins_are_those_of_numpy() -> None:
    sizes = []
    for seed in range(400):
        a, b, without, pruning = random_join(seed)
        found = contents(joined(a, b, without=without, pruning=pruning))
        cells, points = pareto_joins.joined(a, b, without, pruning)
        assert found == sorted(zip(cells.tolist(), *points.T.tolist(), strict=True)), seed
        sizes.append(len(found))
    assert max(sizes) > 100 and sizes.count(0) < 200


def miscounted(seed: int) -> bool:
    """Whether the count differs from the pairs that agree in all common variables within the limit."""
    a, b, without, _ = random_join(seed)
    size_of = dict(zip((*a.variables, *b.variables), (*a.sizes, *b.sizes), strict=True))
    sizes = [size for variable, size in sorted(size_of.items()) if variable != without]
    weights = np.zeros((a.points.shape[1], 1))
    weights[0] = 1.0
    pruning = LabelPruning(weights, weights, weights, np.zeros((*sizes, 1)), 6.0)
    meets = np.ones((len(a), len(b)), dtype=bool)
    at, other = a.coordinates(), b.coordinates()
    for variable in at.keys() & other.keys():
        meets &= at[variable][:, None] == other[variable][None]
    meets &= a.points[:, None, 0] + b.points[None, :, 0] <= 6.0
    return labels.pairs_of(a, b, without=without, pruning=pruning) != int(meets.sum())


def test_pairs_are_counted() -> None:
    assert not any(miscounted(seed) for seed in range(200))


def test_terminal_joins_are_those_of_numpy() -> None:
    """By seconds and bytes alone: the non-dominated labels over all cells."""
    many = fewer = 0
    for seed in range(400):
        a, b, without, pruning = random_join(seed)
        if a.points.shape[1] != 4:
            continue
        terminal = joined(a, b, without=without, pruning=pruning, terminal=TerminalJoin())
        assert (np.diff(terminal.cells) >= 0).all()
        expected = measures(pareto_joins.pairs_of(a, b, without, pruning)[1])
        best = expected[non_dominated(expected)]
        own = measures(terminal.points)
        assert own[np.argsort(own[:, 0])].tolist() == best.tolist(), seed
        close = measures(
            joined(a, b, without=without, pruning=pruning, terminal=TerminalJoin(np.array([2.0, 1.0]))).points
        )
        assert all(((close <= one + np.array([2.0, 1.0])).all(axis=1)).any() for one in own), seed
        fewer += len(close) < len(own)
        many += len(best) > 2
    assert many > 10 and fewer > 10


def with_zero_columns(found: Labels, columns: int, peak_values: int = 0) -> Labels:
    """The labels with zeros in their first columns (in the order 0, 2, 1, 3), and with a limited number of
    distinct peaks, if given.
    """
    points = found.points.copy()
    points[:, [0, 2, 1, 3][:columns]] = 0.0
    if peak_values:
        points[:, 3] = np.floor(points[:, 3] * peak_values / (points[:, 3].max() + 1.0))
    return replace(found, points=points)


@pytest.mark.parametrize(
    ("zero_columns", "peak_values"),
    [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 3), (1, 2), (1, 5), (1, 20), (2, 4)],
)
def test_joins_with_equal_columns_are_those_of_numpy(zero_columns: int, peak_values: int) -> None:
    """Also with more pairs than are compared with the remaining labels at a time."""
    most = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        a, b = (
            with_zero_columns(
                Labels(
                    (0, variable), (3, 2), np.sort(random.integers(0, 6, 150)), random.uniform(0, 9, (150, 4))
                ),
                zero_columns,
                peak_values,
            )
            for variable in (1, 2)
        )
        weights = random.uniform(0.0, 1.0, (4, 2))
        limit = float(random.uniform(0.0, 2.0)) * float(weights.sum()) * 4.0
        other = weights * np.array([[1.0], [1.0], [1.0], [0.0]])  # the larger of two peaks counts
        pruning = LabelPruning(weights, other, weights, random.uniform(0.0, 9.0, (2, 2, 2)), limit)
        found = joined(a, b, without=0, pruning=pruning)
        cells, points = pareto_joins.joined(a, b, 0, pruning)
        most = max(most, labels.pairs_of(a, b, without=0, pruning=pruning))
        assert found.cells.tolist() == cells.tolist(), seed
        order = np.lexsort((*found.points.T[::-1], found.cells))
        assert np.allclose(found.points[order], points, rtol=1e-12, atol=0.0), seed
    assert most > 4 * 1024


def exceeds_tolerance(seed: int, zero_columns: int = 0, peak_values: int = 0) -> bool:
    """Whether some dropped pair is beyond its tolerance of every pair that stays; with some columns zero and
    a limited number of distinct peaks.
    """
    random = np.random.default_rng(seed)
    a, b = (
        with_zero_columns(
            Labels((v,), (3,), np.sort(random.integers(0, 3, 40)), random.uniform(0.0, 20.0, (40, 4))),
            zero_columns,
            peak_values,
        )
        for v in (0, 0)
    )
    own = dominance.EpsilonDominance(
        np.array([0.5, 0.5, 2.0, 1.0]), np.array([0.2, 0.2, 0.8, 0.4]), np.array([0.5, 0.5, 0.25, 0.1]),
        np.array([0.0]),
    )  # fmt: skip
    undominated = joined(a, b, without=0, dominance=own)
    every = a.cells[:, None] == b.cells[None]
    points = (a.points[:, None] + b.points[None])[every]
    points[:, -1] = np.maximum(a.points[:, None, -1], b.points[None, :, -1])[every]
    assert 0 < len(undominated) < len(points)
    may_cost = points + own.base + own.rate * (points @ own.weights)[:, None]
    return not (undominated.points[:, None] <= may_cost[None]).all(axis=2).any(axis=0).all()


@pytest.mark.parametrize(
    ("zero_columns", "peak_values"), [(0, 0), (1, 0), (2, 0), (3, 0), (1, 2), (1, 6), (1, 40)]
)
def test_no_pair_is_dropped_beyond_its_tolerance(zero_columns: int, peak_values: int) -> None:
    assert not any(exceeds_tolerance(seed, zero_columns, peak_values) for seed in range(40))


@pytest.mark.parametrize(("zero_columns", "peak_values"), [(0, 0), (1, 0), (2, 0), (1, 6)])
def test_a_tolerance_that_grows_too_fast_is_noticed(
    monkeypatch: pytest.MonkeyPatch, zero_columns: int, peak_values: int
) -> None:
    monkeypatch.setattr(dominance.EpsilonDominance, "growth", 8.0)
    assert any(exceeds_tolerance(seed, zero_columns, peak_values) for seed in range(40))


def test_labels_of_one_table_stay_as_by_numpy() -> None:
    """Except where a label is matched by another one with a finer grid range and a lower rank: numpy keeps
    both.
    """
    fewer = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        cells, points = np.sort(random.integers(0, 3, 300)), random.uniform(0.0, 40.0, (300, 4))
        own = dominance.EpsilonDominance(
            np.array([4.0, 4.0, 8.0, 4.0]), np.array([0.5, 0.5, 2.0, 1.0]), np.array([1.0, 0.0, 0.25, 0.0]),
            np.array([0.0, -5.0, 3.0]),
        )  # fmt: skip
        ranks = points.sum(axis=1)
        found = dominance.reduced(cells, points, ranks, own)
        expected = pareto_joins.reduced(cells, points, ranks, own)
        assert (np.diff(cells[found]) >= 0).all()
        steps = own.base * 2.0 ** pareto_joins.grids_of(cells, points, own)[:, None]
        floors = np.floor(points[found][:, None] / steps[None])
        is_matched = (floors <= np.floor(points / steps)[None]).all(axis=2)
        is_matched &= cells[found][:, None] == cells[None]
        assert is_matched.any(axis=0).all(), seed
        assert len(found) <= len(expected) <= len(found) + 1, seed
        fewer += len(found) < len(expected)
    assert fewer < 6


def factor_sums_agree(seed: int) -> bool:
    """Whether tables, outside sums and min-marginals agree, for parts of random chains, equal layers, and a
    part with many choices.
    """
    random = np.random.default_rng(seed)
    parts = [
        equal_layers(seed),
        complete_graph(seed),
        *(part for segment in chain_of(seed) for _, part in segment.modes),
    ]
    for part in parts:
        weights = random.integers(0, 4, (3, 5)).astype(float)
        some = random.choice(len(part.factors), min(2, len(part.factors)), replace=False)
        peak_shares = tuple((int(factor), 0.5) for factor in some)
        own = FactorSums.of(part, order_of(part), weights, peak_shares)
        other = ReferenceSums(part, weights, peak_shares)
        outside = random.integers(0, 9, other.last.shape).astype(float)
        for distribute in (own.distribute, other.distribute):
            distribute(outside)
        fixed = {variable: random.integers(0, part.sizes[variable], 3) for variable in part.separator}
        chosen = own.choices(fixed), other.choices(fixed)
        for table in other.tables:
            if not np.array_equal(own.tables[table], other.tables[table]):
                return False
            finite = np.isfinite(other.outside[table])
            if not np.array_equal(np.isfinite(own.outside[table]), finite):
                return False
            if not np.allclose(own.outside[table][finite], other.outside[table][finite]):
                return False
        potentials = own.potentials(outside[..., :1]), other.potentials(outside[..., :1])
        for table in other.tables:
            one, two = potentials[0][table][..., 0], potentials[1][table][..., 0]
            finite = np.isfinite(two)
            if not np.array_equal(np.isfinite(one), finite) or not np.allclose(one[finite], two[finite]):
                return False
        for one, two in zip(own.min_marginals(), other.min_marginals(), strict=True):
            if not np.array_equal(one, two):
                return False
        for variable, values in chosen[1].items():
            if not (chosen[0][variable] == values).all():
                return False
    return True


@pytest.mark.slow
def test_weighted_sums_are_those_of_numpy() -> None:
    assert all(factor_sums_agree(seed) for seed in range(60))


def every_peak_weighed(costs: Any, weights: Any, sums: Any) -> None:
    """The mutant weighs the peak of every choice."""
    SUMS["weighted_costs"](costs, weights, sums)
    sums[:, : costs.shape[1]] += weights[:, 4:] * costs[4]


def values_too_low(name: str) -> Callable[..., Any]:
    """A mutant that fills its last argument with values a tenth too low."""

    def broken(*arguments: Any) -> None:
        SUMS[name](*arguments)
        arguments[-1][:] = arguments[-1] * 0.9

    return broken


def min_marginals_too_low(*arguments: Any) -> Any:
    """The mutant makes min-marginals a tenth too low."""
    start, found = SUMS["min_marginal_sums"](*arguments)
    return start, 0.9 * found


def first_choice(program: Any, sizes: Any, offsets: Any, sums: Any, chosen: Any) -> None:
    """The mutant takes the first choice of every eliminated variable."""
    others = set(range(len(sizes))) - set(program.taken.tolist())
    chosen[[variable for variable in range(len(sizes)) if variable not in others]] = 0


SUMS = {name: getattr(weighted_sums_numba, name) for name in (
    "weighted_costs", "least_sums", "sums_outside", "potential_sums", "min_marginal_sums", "least_choices",
)}  # fmt: skip

BROKEN_SUMS = {
    "weighted_costs": every_peak_weighed,
    "min_marginal_sums": min_marginals_too_low,
    "least_choices": first_choice,
    **{name: values_too_low(name) for name in ("least_sums", "sums_outside", "potential_sums")},
}


@pytest.mark.parametrize("name", SUMS)
def test_broken_sums_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(weighted_sums_numba, name, BROKEN_SUMS[name])
    assert not all(factor_sums_agree(seed) for seed in range(20))


LOWER = weighted_sums_numba._lower


def without_last_rows(target: Any, constants: Any, *rest: Any) -> None:
    """The mutant leaves out the rows after the last multiple of four."""
    LOWER(target, constants[: len(constants) // 4 * 4], *rest)


def adds_nothing(row: Any, packed: Any, start: int) -> None:
    """The mutant does not add a table that is constant along the eliminated variable."""


@pytest.mark.parametrize(("name", "broken"), [("_lower", without_last_rows), ("_add", adds_nothing)])
def test_rows_that_are_left_out_are_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., None]
) -> None:
    """The loops run in Python, so that they call the patched functions."""
    for outer in ("least_sums", "sums_outside", "_fill"):
        monkeypatch.setattr(weighted_sums_numba, outer, getattr(weighted_sums_numba, outer).py_func)
    assert factor_sums_agree(0)
    monkeypatch.setattr(weighted_sums_numba, name, broken)
    assert not all(factor_sums_agree(seed) for seed in range(6))


@pytest.mark.slow
def test_the_pareto_search_finds_the_enumerated_frontier(full: bool) -> None:
    assert agrees(range(150 if full else 25))
    assert agrees(range(60 if full else 10), chain_with_shared)


@pytest.mark.slow
def test_every_point_is_matched_within_epsilon(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    tune(monkeypatch, tolerance_from_pairs=0)
    thinner, seeds = 0, LONG if full else SOME_LONG
    for seed in seeds:
        chain = long_chain(seed)
        expected = by_labels(chain, chain_labels.merged)[0]
        for epsilon in (0.003, 0.05):
            close = pareto_search([chain], epsilon=epsilon)
            assert matches(close.points, expected, epsilon), (seed, epsilon)
            thinner += len(close.points) < len(expected)
    assert thinner > len(seeds) / 2


IN_EXTENSION, IN_FINAL_JOIN = (
    completion_bounds.CompletionBounds.in_extension,
    completion_bounds.CompletionBounds.in_final_join,
)


def suffix_bounds_too_high(own: completion_bounds.CompletionBounds, border: int, after: int, end: int) -> Any:
    """The mutant takes completion bounds of extensions from the end for a tenth more than they are."""
    pruning, tolerance = IN_EXTENSION(own, border, after, end)
    return (replace(pruning, outside=(1.1 if end else 1.0) * pruning.outside), tolerance)


def test_suffix_extensions_that_prune_too_much_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_bounds.CompletionBounds, "in_extension", suffix_bounds_too_high)
    assert not agrees(starting_with(26, range(150)))


def slack_too_large(own: completion_bounds.CompletionBounds, border: int) -> Any:
    """The mutant allows a hundred times the tolerance in the final join."""
    pruning, slack = IN_FINAL_JOIN(own, border)
    return pruning, None if slack is None else 100.0 * slack


def test_a_final_join_beyond_its_tolerance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_bounds.CompletionBounds, "in_final_join", slack_too_large)
    chains = (long_chain(seed) for seed in LONG)
    assert not all(
        matches(pareto_search([chain], epsilon=0.05).points, by_labels(chain, chain_labels.merged)[0], 0.05)
        for chain in chains
    )


def test_compiled_functions_older_than_a_module_are_discarded(tmp_path: Path) -> None:
    """Caches older than any module are discarded, even if the module of the function did not change; newer
    ones stay.
    """
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    for name, time_s in (("a.py", 100), ("b.py", 300)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time_s, time_s))
    for name, time_s in (("a.f-1.nbi", 200), ("a.f-1.1.nbc", 200), ("b.g-1.nbi", 400), ("a.pyc", 200)):
        (cache / name).touch()
        os.utime(cache / name, (time_s, time_s))
    compilation.discard_stale_caches(tmp_path)
    assert sorted(path.name for path in cache.iterdir()) == ["a.pyc", "b.g-1.nbi"]
    compilation.discard_stale_caches(tmp_path / "nowhere")  # a folder without modules has no caches


def test_without_a_cache_folder_functions_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling = numba.njit

    def without_a_folder(*functions: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("no locator available")
        return compiling(*functions, **options)

    monkeypatch.setattr(numba, "njit", without_a_folder)

    def twice(number: float) -> float:
        return 2.0 * number

    assert compilation.numba_compiled(twice)(3.0) == 6.0


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["most_pairs_with_tolerance", "most_labels_with_tolerance"])
def test_a_search_over_its_limit_reports_its_proven_epsilon(
    monkeypatch: pytest.MonkeyPatch, limit: str, full: bool
) -> None:
    stopped = 0
    for seed in LONG if full else SOME_LONG:
        chain = long_chain(seed)
        expected = by_labels(chain, chain_labels.merged)[0]
        with monkeypatch.context() as patched:
            tune(patched, **{limit: 15}, labels_per_cell=0)
            found = pareto_search([chain], epsilon=0.001)
        assert matches(found.points, expected, found.epsilon), seed
        stopped += found.epsilon > 0.001
    assert stopped > (2 if full else 0)


JOINED, TERMINAL, SIDE = labels_numba.joined_sides, joins_numba.terminal_pairs, joins_numba.side_of


def limits_too_low(one: Any, other: Any, choices: int, pruning_arrays: Any, *rest: Any) -> Any:
    """The mutant lowers limits by a fifth."""
    return JOINED(one, other, choices, pruning_arrays._replace(limit=0.8 * pruning_arrays.limit), *rest)


def without_last_choice(one: Any, other: Any, choices: int, *rest: Any) -> Any:
    """The mutant forgets the last choice of the eliminated variable."""
    return JOINED(one, other, max(choices - 1, 1), *rest)


def without_last_column(one: Any, other: Any, *rest: Any) -> Any:
    """The mutant does not compare the last column that differs."""
    differs, also = one[1].copy(), other[1].copy()
    last = np.flatnonzero(differs + also)[-1:]
    differs[last] = also[last] = 0.0
    return JOINED((one[0], differs, one[2]), (other[0], also, other[2]), *rest)


def terminal_limits_too_low(a: Any, b: Any, choices: int, pruning_arrays: Any, slack: Any, most: int) -> Any:
    return TERMINAL(a, b, choices, pruning_arrays._replace(limit=0.8 * pruning_arrays.limit), slack, most)


def rows_by_descending_sums(*arguments: Any) -> Any:
    """The mutant sorts rows by descending sums, so the first row above the limit ends a cell too early."""
    points, cells, weights, *rest = arguments
    side, *others = SIDE(points, cells, -weights, *rest)
    return side._replace(sums=-side.sums), *others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (labels_numba, "joined_sides", limits_too_low),
        (labels_numba, "joined_sides", without_last_choice),
        (labels_numba, "joined_sides", without_last_column),
        (joins_numba, "terminal_pairs", terminal_limits_too_low),
        (joins_numba, "side_of", rows_by_descending_sums),
    ],
)
def test_a_broken_loop_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert not agrees(range(60))


def test_a_missing_numba_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation.require_numba()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError) as raised:
        compilation.require_numba()
    assert raised.value.key == "numba"
    assert raised.value.allowed == "pip install 'shardwise[graph]', or pip install '.[graph]' in a checkout"


def test_only_own_functions_are_compiled_at_a_lower_level() -> None:
    settings: Any = config
    compiling: Any = numba.njit
    wider: Any = joins_numba.wider
    levels: list[int] = []

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            levels.append(int(settings.OPT))

        def on_end(self, event: Any) -> None:
            pass

    before = int(settings.OPT)
    with event.install_listener("numba:compile", Listener()):
        compiling(wider.py_func)(np.zeros((2, 3)))
        assert levels[0] == 1 < before == int(settings.OPT)
        levels.clear()
        compiling(lambda number: number + 1)(1)
    assert set(levels) == {before}


def test_compilation_is_reported_once() -> None:
    """Two functions are compiled, then one of them runs again."""
    reported: list[str] = []
    one, other = (numba.njit(lambda number, own=own: own * number) for own in (2.0, 3.0))
    with compilation.reporting_compilation(reported.append):
        assert one(2.0) * other(2.0) == 24.0
    assert reported == [compilation.COMPILING]
    with compilation.reporting_compilation(reported.append):
        one(3.0)
    with compilation.reporting_compilation(None):
        one(3)  # compiled for whole numbers
    assert reported == [compilation.COMPILING]


def test_tables_equal_to_an_earlier_one_are_computed_once() -> None:
    part = equal_layers(3, layers=4)
    own = FactorSums.of(part, order_of(part), np.ones((2, 5)))
    other = FactorSums.of(replace(part), order_of(part), np.ones((2, 5)))
    assert len(set(own.first.tolist())) < len(own.first)
    assert own.columns.shape == other.columns.shape
    assert own.columns.shape[1] < int(own.places[-1])


PROGRAM = """
from numba.core import event
from shardwise.search.pareto.compilation import numba_compiled

@numba_compiled
def twice(x):
    return 2 * x

with event.install_recorder("numba:compile") as recorder:
    print(twice(21), len(recorder.buffer) > 0)
"""


@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("damage", [b"", b"not a pickle"])
def test_a_damaged_cache_is_compiled_again(tmp_path: Path, pattern: str, damage: bytes) -> None:
    """Damaged index or code: the next process compiles and writes whole files, the one after loads them."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def printed() -> str:
        command = [sys.executable, str(program)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert printed() == "42 True\n"
    (path,) = (tmp_path / "__pycache__").glob(pattern)
    path.write_bytes(damage)
    assert (printed(), printed()) == ("42 True\n", "42 False\n")
