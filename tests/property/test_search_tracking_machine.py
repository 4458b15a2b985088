"""What machine code finds is what numpy finds; with a loss, nothing that costs more than it may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from tests.property.test_search_tracking import LONG, SOME_LONG, agrees, by_labels, matches
from tests.property.tracking_instances import (
    braid,
    chain_of,
    hubbed_chain,
    knot,
    long_chain,
    starting_with,
)

from shardwise.frontier import reduce
from shardwise.search.tracking import (
    bounds,
    compiled,
    compiled_labels,
    compiled_parts,
    compiled_sums,
    eliminate,
    grid,
    labels,
    machine,
    tracked,
    walk,
)
from shardwise.search.tracking.labels import Ends, Labels, Within, joined
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.solution import measures
from shardwise.search.tracking.steps import order_of

pytestmark = pytest.mark.usefixtures("by_lines")

NEVER = 1 << 60


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code for every join and every part."""
    assert machine.is_installed(), "pip install 'shardwise[fast]'"
    monkeypatch.setattr(machine, "PAYS_FROM", 0)
    monkeypatch.setattr(machine, "SUMS_PAY_FROM", 0)


def table(
    random: np.random.Generator, variables: tuple[int, ...], sizes: tuple[int, ...], columns: int
) -> Labels:
    """Labels with small whole numbers, so that many are equal, in some of the cells."""
    count = int(random.integers(1, 60))
    cells = np.sort(random.integers(0, int(np.prod(sizes)), count))
    return Labels(variables, sizes, cells, random.integers(0, 6, (count, columns)).astype(float))


def drawn(seed: int) -> tuple[Labels, Labels, int | None, Within | None]:
    """Two tables with some variables in common, one of which may be taken out; half of them within a reach in
    one to three forms."""
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
    forms = int(random.integers(1, 4))
    weights = random.integers(0, 3, (columns, forms)).astype(float)
    own, other = weights.copy(), weights.copy()
    other[-1] = 0.0
    outside = random.integers(0, 9, (*left, forms)).astype(float)
    outside[random.random(left) < 0.1] = np.inf
    peaks = random.integers(0, 6, left).astype(float) if random.random() < 0.5 else None
    return a, b, without, Within(own, other, weights, outside, float(random.integers(8, 40)), peaks)


def contents(found: Labels) -> list[tuple[int, ...]]:
    assert (np.diff(found.cells) >= 0).all()
    (a, rows_a), (b, rows_b) = found.origins
    points = a.points[rows_a] + b.points[rows_b]
    assert (points[:, :-1] == found.points[:, :-1]).all()
    return sorted(zip(found.cells.tolist(), *found.points.T.tolist(), strict=True))


def test_joins_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for seed in range(400):
        a, b, without, within = drawn(seed)
        found = contents(joined(a, b, without=without, within=within))
        monkeypatch.setattr(machine, "PAYS_FROM", NEVER)
        expected = contents(joined(a, b, without=without, within=within))
        monkeypatch.setattr(machine, "PAYS_FROM", 0)
        assert found == expected, seed
        sizes.append(len(found))
    assert max(sizes) > 100 and sizes.count(0) < 200


def miscounted(seed: int) -> bool:
    """Whether the pairs are not as many as agree in all common variables and weigh less than the limit."""
    a, b, without, _ = drawn(seed)
    sizes = labels._left(a, b, without)[1]
    weights = np.zeros((a.points.shape[1], 1))
    weights[0] = 1.0
    within = Within(weights, weights, weights, np.zeros((*sizes, 1)), 6.0)
    meets = np.ones((len(a), len(b)), dtype=bool)
    at, other = a.coordinates(), b.coordinates()
    for variable in at.keys() & other.keys():
        meets &= at[variable][:, None] == other[variable][None]
    meets &= a.points[:, None, 0] + b.points[None, :, 0] <= 6.0
    return labels.pairs_of(a, b, without=without, within=within) != int(meets.sum())


def test_pairs_are_counted() -> None:
    assert not any(miscounted(seed) for seed in range(200))


def test_ends_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """By seconds and bytes alone: what is best of all cells."""
    many = fewer = 0
    for seed in range(400):
        a, b, without, within = drawn(seed)
        if a.points.shape[1] != 4:
            continue
        ends = joined(a, b, without=without, within=within, ends=Ends())
        monkeypatch.setattr(machine, "PAYS_FROM", NEVER)
        every = joined(a, b, without=without, within=within, ends=Ends())
        monkeypatch.setattr(machine, "PAYS_FROM", 0)
        expected = measures(every.points)
        best = expected[reduce(expected)]
        own = measures(ends.points)
        assert own[np.argsort(own[:, 0])].tolist() == best.tolist(), seed
        close = measures(joined(a, b, without=without, within=within, ends=Ends(np.array([2.0, 1.0]))).points)
        assert all(((close <= one + np.array([2.0, 1.0])).all(axis=1)).any() for one in own), seed
        fewer += len(close) < len(own)
        many += len(best) > 2
    assert many > 10 and fewer > 10


def with_alike(found: Labels, columns: int, levels: int = 0) -> Labels:
    """The labels with nothing in the first of so many columns, and in others from the third on; with so many
    levels of peaks, if any."""
    points = found.points.copy()
    points[:, [0, 2, 1, 3][:columns]] = 0.0
    if levels:
        points[:, 3] = np.floor(points[:, 3] * levels / (points[:, 3].max() + 1.0))
    return replace(found, points=points)


@pytest.mark.parametrize(
    ("alike", "levels"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 3), (1, 2), (1, 5), (1, 20), (2, 4)]
)
def test_joins_where_some_columns_are_alike_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, alike: int, levels: int
) -> None:
    """Also of more pairs than are held against the labels that stay at a time."""
    most = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        a, b = (
            with_alike(
                Labels(
                    (0, variable), (3, 2), np.sort(random.integers(0, 6, 150)), random.uniform(0, 9, (150, 4))
                ),
                alike,
                levels,
            )
            for variable in (1, 2)
        )
        weights = random.uniform(0.0, 1.0, (4, 2))
        reach = float(random.uniform(0.0, 2.0)) * float(weights.sum()) * 4.0
        other = weights * np.array([[1.0], [1.0], [1.0], [0.0]])  # of two peaks one counts
        within = Within(weights, other, weights, random.uniform(0.0, 9.0, (2, 2, 2)), reach)
        found = joined(a, b, without=0, within=within)
        monkeypatch.setattr(machine, "PAYS_FROM", NEVER)
        expected = joined(a, b, without=0, within=within)
        monkeypatch.setattr(machine, "PAYS_FROM", 0)
        most = max(most, labels.pairs_of(a, b, without=0, within=within))
        assert found.cells.tolist() == expected.cells.tolist(), seed
        order = np.lexsort((*expected.points.T[::-1], expected.cells))
        assert np.allclose(found.points, expected.points[order], rtol=1e-12, atol=0.0), seed
    assert most > 4 * 1024


def lost_too_much(seed: int, alike: int = 0, levels: int = 0) -> bool:
    """Whether a pair that is left out costs more than it may less than every pair that stays; so many columns
    alike, and so many levels of peaks."""
    random = np.random.default_rng(seed)
    a, b = (
        with_alike(
            Labels((v,), (3,), np.sort(random.integers(0, 3, 40)), random.uniform(0.0, 20.0, (40, 4))),
            alike,
            levels,
        )
        for v in (0, 0)
    )
    own = grid.Grid(
        np.array([0.5, 0.5, 2.0, 1.0]), np.array([0.2, 0.2, 0.8, 0.4]), np.array([0.5, 0.5, 0.25, 0.1]),
        np.array([0.0]),
    )  # fmt: skip
    kept = joined(a, b, without=0, grid=own)
    every = a.cells[:, None] == b.cells[None]
    points = (a.points[:, None] + b.points[None])[every]
    points[:, -1] = np.maximum(a.points[:, None, -1], b.points[None, :, -1])[every]
    assert 0 < len(kept) < len(points)
    may_cost = points + own.base + own.rate * (points @ own.weights)[:, None]
    return not (kept.points[:, None] <= may_cost[None]).all(axis=2).any(axis=0).all()


@pytest.mark.parametrize(("alike", "levels"), [(0, 0), (1, 0), (2, 0), (3, 0), (1, 2), (1, 6), (1, 40)])
def test_no_pair_loses_more_than_its_excess_allows(alike: int, levels: int) -> None:
    assert not any(lost_too_much(seed, alike, levels) for seed in range(40))


@pytest.mark.parametrize(("alike", "levels"), [(0, 0), (1, 0), (2, 0), (1, 6)])
def test_a_loss_that_grows_too_fast_is_noticed(
    monkeypatch: pytest.MonkeyPatch, alike: int, levels: int
) -> None:
    monkeypatch.setattr(grid.Grid, "growth", 8.0)
    assert any(lost_too_much(seed, alike, levels) for seed in range(40))


def test_labels_of_one_table_stay_as_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are alike one of a finer range of the grid, and of less rank: numpy keeps both."""
    fewer = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        cells, points = np.sort(random.integers(0, 3, 300)), random.uniform(0.0, 40.0, (300, 4))
        own = grid.Grid(
            np.array([4.0, 4.0, 8.0, 4.0]), np.array([0.5, 0.5, 2.0, 1.0]), np.array([1.0, 0.0, 0.25, 0.0]),
            np.array([0.0, -5.0, 3.0]),
        )  # fmt: skip
        ranks = points.sum(axis=1)
        found = grid.reduced(cells, points, ranks, own)
        monkeypatch.setattr(machine, "PAYS_FROM", NEVER)
        expected = grid.reduced(cells, points, ranks, own)
        monkeypatch.setattr(machine, "PAYS_FROM", 0)
        assert (np.diff(cells[found]) >= 0).all()
        steps = own.base * 2.0 ** own.ranges(cells, points)[:, None]
        floors = np.floor(points[found][:, None] / steps[None])
        is_matched = (floors <= np.floor(points / steps)[None]).all(axis=2)
        is_matched &= cells[found][:, None] == cells[None]
        assert is_matched.any(axis=0).all(), seed
        assert len(found) <= len(expected) <= len(found) + 1, seed
        fewer += len(found) < len(expected)
    assert fewer < 6


def scalars_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tables, what is outside of them and through their variables, of chains' parts, of layers alike, and of
    a part with many choices."""
    random = np.random.default_rng(seed)
    parts = [braid(seed), knot(seed), *(part for link in chain_of(seed) for _, part in link.modes)]
    for part in parts:
        weights = random.integers(0, 4, (3, 5)).astype(float)
        some = random.choice(len(part.factors), min(2, len(part.factors)), replace=False)
        peaked = tuple((int(factor), 0.5) for factor in some)
        own = Scalars.of(part, order_of(part), weights, peaked)
        monkeypatch.setattr(machine, "SUMS_PAY_FROM", NEVER)
        other = Scalars.of(part, order_of(part), weights, peaked)
        monkeypatch.setattr(machine, "SUMS_PAY_FROM", 0)
        assert own.flat is not None and other.flat is None
        outside = random.integers(0, 9, other.last.shape).astype(float)
        for scalars in (own, other):
            scalars.spread(outside)
        ends = {variable: random.integers(0, part.sizes[variable], 3) for variable in part.kept}
        chosen = [scalars.choices(ends) for scalars in (own, other)]
        for table in other.made:
            if not np.array_equal(own.tables[table], other.tables[table]):
                return False
            finite = np.isfinite(other.outside[table])
            if not np.array_equal(np.isfinite(own.outside[table]), finite):
                return False
            if not np.allclose(own.outside[table][finite], other.outside[table][finite]):
                return False
        alike = own.potentials(outside[..., :1]), other.potentials(outside[..., :1])
        for table in other.made:
            one, two = alike[0][table][..., 0], alike[1][table][..., 0]
            finite = np.isfinite(two)
            if not np.array_equal(np.isfinite(one), finite) or not np.allclose(one[finite], two[finite]):
                return False
        for one, two in zip(own.through(), other.through(), strict=True):
            if not np.array_equal(one, two):
                return False
        for variable, values in chosen[1].items():
            if not (chosen[0][variable] == values).all():
                return False
    return True


def test_weighted_sums_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(scalars_agree(seed, monkeypatch) for seed in range(60))


def weighted_alike(costs: Any, weights: Any, sums: Any) -> None:
    """The peak weighed wherever there is one."""
    SUMS["weighted_costs"](costs, weights, sums)
    sums[:, : costs.shape[1]] += weights[:, 4:] * costs[4]


def with_less(name: str) -> Callable[..., Any]:
    """All that a function fills in, its last argument, a tenth less."""

    def broken(*arguments: Any) -> None:
        SUMS[name](*arguments)
        arguments[-1][:] = arguments[-1] * 0.9

    return broken


def through_one(*arguments: Any) -> Any:
    """What leads through a choice told a tenth too low."""
    start, found = SUMS["sums_through"](*arguments)
    return start, 0.9 * found


def another_choice(program: Any, sizes: Any, offsets: Any, sums: Any, chosen: Any) -> None:
    """The first choice of all that is taken out."""
    kept = set(range(len(sizes))) - set(program.taken.tolist())
    chosen[[variable for variable in range(len(sizes)) if variable not in kept]] = 0


SUMS = {name: getattr(compiled_sums, name) for name in (
    "weighted_costs", "least_sums", "sums_outside", "potential_sums", "sums_through", "least_choices",
)}  # fmt: skip

BROKEN_SUMS = {
    "weighted_costs": weighted_alike,
    "sums_through": through_one,
    "least_choices": another_choice,
    **{name: with_less(name) for name in ("least_sums", "sums_outside", "potential_sums")},
}


@pytest.mark.parametrize("name", SUMS)
def test_broken_sums_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(compiled_sums, name, BROKEN_SUMS[name])
    assert not all(scalars_agree(seed, monkeypatch) for seed in range(20))


LOWER = compiled_sums._lower


def without_the_rest(target: Any, constants: Any, *rest: Any) -> None:
    """Rows beyond the last four are left out."""
    LOWER(target, constants[: len(constants) // 4 * 4], *rest)


def adds_nothing(row: Any, packed: Any, start: int) -> None:
    """A table that is the same for all that is summed over is not added."""


@pytest.mark.parametrize(("name", "broken"), [("_lower", without_the_rest), ("_add", adds_nothing)])
def test_rows_that_are_left_out_are_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., None]
) -> None:
    """The loops in Python, which call what is put in their module."""
    for outer in ("least_sums", "sums_outside", "_fill"):
        monkeypatch.setattr(compiled_sums, outer, getattr(compiled_sums, outer).py_func)
    assert scalars_agree(0, monkeypatch)
    monkeypatch.setattr(compiled_sums, name, broken)
    assert not all(scalars_agree(seed, monkeypatch) for seed in range(6))


def test_tracking_finds_what_enumeration_finds(full: bool) -> None:
    assert agrees(range(150 if full else 25))
    assert agrees(range(60 if full else 10), hubbed_chain)


def test_an_epsilon_is_all_that_is_lost(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    monkeypatch.setattr(eliminate, "MANY", 0)
    thinner, seeds = 0, LONG if full else SOME_LONG
    for seed in seeds:
        chain = long_chain(seed)
        expected = by_labels(chain, walk.merged)[0]
        for epsilon in (0.003, 0.05):
            close = tracked([chain], epsilon=epsilon)
            assert matches(close.points, expected, epsilon), (seed, epsilon)
            thinner += len(close.points) < len(expected)
    assert thinner > len(seeds) / 2


IN_WALK, IN_WHOLE = bounds.Bounds.in_walk, bounds.Bounds.in_whole


def from_the_end_too_near(own: bounds.Bounds, border: int, after: int, end: int) -> Any:
    """What is still to come of walks from the end taken for a tenth more than it is."""
    within, losing = IN_WALK(own, border, after, end)
    return (replace(within, outside=(1.1 if end else 1.0) * within.outside), losing)


def test_walks_from_the_end_that_see_too_little_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds.Bounds, "in_walk", from_the_end_too_near)
    assert not agrees(starting_with(26, range(150)))


def with_slack(own: bounds.Bounds, border: int) -> Any:
    """A hundred times what may be lost where walks meet."""
    within, slack = IN_WHOLE(own, border)
    return within, None if slack is None else 100.0 * slack


def test_a_meeting_that_loses_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds.Bounds, "in_whole", with_slack)
    chains = (long_chain(seed) for seed in LONG)
    assert not all(
        matches(tracked([chain], epsilon=0.05).points, by_labels(chain, walk.merged)[0], 0.05)
        for chain in chains
    )


def test_where_nothing_can_be_kept_functions_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling = numba.njit

    def without_a_folder(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("no locator available")
        return compiling(**options)

    monkeypatch.setattr(numba, "njit", without_a_folder)

    def twice(number: float) -> float:
        return 2.0 * number

    assert compiled.machine_code(twice)(3.0) == 6.0


@pytest.mark.parametrize("limit", ["CLOSE_PAIRS", "CLOSE_LABELS"])
def test_a_search_that_would_take_too_long_tells_what_it_proved(
    monkeypatch: pytest.MonkeyPatch, limit: str, full: bool
) -> None:
    stopped = 0
    for seed in LONG if full else SOME_LONG:
        chain = long_chain(seed)
        expected = by_labels(chain, walk.merged)[0]
        with monkeypatch.context() as patched:
            patched.setattr(labels, limit, 15)
            patched.setattr(labels, "LABELS_PER_CELL", 0)
            found = tracked([chain], epsilon=0.001)
        assert matches(found.points, expected, found.epsilon), seed
        stopped += found.epsilon > 0.001
    assert stopped > (2 if full else 0)


PAIRS, ENDS, SIDE = compiled_labels.labels_of_pairs, compiled.ends_of_pairs, compiled.side_of


def nearer(a: Any, b: Any, choices: int, reach: Any, *rest: Any) -> Any:
    """Limits that are taken for a fifth less than they are."""
    return PAIRS(a, b, choices, reach._replace(limit=0.8 * reach.limit), *rest)


def without_last(a: Any, b: Any, choices: int, *rest: Any) -> Any:
    """The last choice of what is taken out is forgotten."""
    return PAIRS(a, b, max(choices - 1, 1), *rest)


def fewer_columns(a: Any, b: Any, choices: int, reach: Any, loss: Any, columns: Any, *rest: Any) -> Any:
    """The last column that differs is not compared."""
    return PAIRS(a, b, choices, reach, loss, columns[:-1], *rest)


def ends_nearer(a: Any, b: Any, choices: int, reach: Any, slack: Any, most: int) -> Any:
    return ENDS(a, b, choices, reach._replace(limit=0.8 * reach.limit), slack, most)


def unsorted(*arguments: Any) -> Any:
    """Rows by descending sums, of which the first that is too much ends a cell."""
    points, cells, weights, *rest = arguments
    side, *others = SIDE(points, cells, -weights, *rest)
    return side._replace(sums=-side.sums), *others


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (compiled_labels, "labels_of_pairs", nearer),
        (compiled_labels, "labels_of_pairs", without_last),
        (compiled_labels, "labels_of_pairs", fewer_columns),
        (compiled, "ends_of_pairs", ends_nearer),
        (compiled, "side_of", unsorted),
    ],
)
def test_a_broken_loop_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any]
) -> None:
    # In Python, which calls what is put in its module.
    joining: Any = compiled_labels.joined_sides
    for caller in (compiled_labels, compiled_parts):
        monkeypatch.setattr(caller, "joined_sides", joining.py_func)
    for function in ("eliminated_labels", "_sides", "_side"):
        monkeypatch.setattr(compiled_parts, function, getattr(compiled_parts, function).py_func)
    assert agrees(range(3))
    monkeypatch.setattr(module, name, broken)
    for caller in (compiled_labels, compiled_parts):
        if hasattr(caller, name):
            monkeypatch.setattr(caller, name, broken)
    assert not agrees(range(60))


def test_without_numba_numpy_does_it(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda: False)
    for module, function in (
        (compiled_labels, "labels_of_pairs"), (compiled_labels, "joined_sides"), (compiled, "ends_of_pairs"),
        (compiled, "number_of_pairs"), (compiled_parts, "eliminated_labels"),
    ):  # fmt: skip
        monkeypatch.setattr(module, function, None)
    assert agrees(range(20 if full else 8))


def test_what_is_like_an_earlier_table_is_not_made_again() -> None:
    part = braid(3, layers=4)
    own = Scalars.of(part, order_of(part), np.ones((2, 5)))
    other = Scalars.of(replace(part), order_of(part), np.ones((2, 5)))
    assert own.flat is not None and other.flat is not None
    assert len(set(own.made.values())) < len(own.made)
    assert own.flat.sums.shape == other.flat.sums.shape
    assert own.flat.sums.shape[1] < int(own.flat.places[-1])
