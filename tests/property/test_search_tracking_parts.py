"""The labels of a part that machine code makes in one go are those that are made step by step, and lose no
more; what is known to be alike is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.property.test_search_tracking_losses import lost_in_a_braid, lost_in_a_part
from tests.property.tracking_instances import braid, chain_of, hubbed_chain, knot

from shardwise.frontier import Factor, Part, firsts
from shardwise.search.tracking import (
    compiled_parts,
    eliminate,
    flat_labels,
    labels,
    machine,
    prune,
)
from shardwise.search.tracking.chained import Weighing, weighed
from shardwise.search.tracking.eliminate import Limits, eliminated
from shardwise.search.tracking.labels import Labels, TooManyLabels
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.solution import part_costs
from shardwise.search.tracking.state import orders_of
from shardwise.search.tracking.steps import Order, order_of

NEVER = 1 << 60


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code for every part."""
    assert machine.is_installed(), "pip install 'shardwise[fast]'"
    for least in ("PAYS_FROM", "SUMS_PAY_FROM"):
        monkeypatch.setattr(machine, least, 0)


def some_parts(seeds: range) -> Iterator[tuple[int, Part]]:
    """Parts of all shapes, some with layers that are alike."""
    for seed in seeds:
        chain = chain_of(seed, operators=8, layouts=4) if seed % 2 else hubbed_chain(seed)
        every = [part for link in chain for _, part in link.modes]
        for part in [*every, braid(seed), knot(seed)]:
            if part.factors:
                yield seed, part


def two_ways(seed: int, part: Part, monkeypatch: pytest.MonkeyPatch) -> list[Labels]:
    """The labels of a part near its least sums, in one go and step by step."""
    random = np.random.default_rng(seed)
    weights = random.uniform(0.0, 1.0, (int(random.integers(1, 4)), 5)).round(2)
    peaked = ((int(random.integers(len(part.factors))), 1.0),)
    found, near = [], float(random.uniform(1.0, 1.6))
    for pays_from in (0, NEVER):
        monkeypatch.setattr(machine, "SUMS_PAY_FROM", pays_from)
        order = order_of(part)
        scalars = Scalars.of(part, order, weights, peaked)
        assert (scalars.flat is not None) == (pays_from == 0)
        scalars.spread(np.zeros_like(scalars.last))
        finite = scalars.last[np.isfinite(scalars.last).all(axis=-1)]
        limit = float(finite.max(axis=1).min() * near) + 1.0 if len(finite) else 1.0
        found.append(eliminated(part, order, Limits(scalars, limit)))
    return found


def contents(found: Labels) -> list[tuple[float, ...]]:
    """Cells with what is in them, the cells by their variables in ascending order."""
    order = np.argsort(found.variables)
    at = found.coordinates()
    cells = [at[found.variables[place]].tolist() for place in order]
    rows = zip(*cells, *found.points.round(9).T.tolist(), strict=True)
    return sorted(rows)


def agree(seeds: range, monkeypatch: pytest.MonkeyPatch) -> bool:
    return all(
        contents(at_once) == contents(by_steps)
        for at_once, by_steps in (two_ways(seed, part, monkeypatch) for seed, part in some_parts(seeds))
    )


def test_labels_made_in_one_go_are_those_made_step_by_step(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    assert agree(range(200 if full else 40), monkeypatch)


def test_what_each_label_chose_costs_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    for seed, part in some_parts(range(20)):
        found, _ = two_ways(seed, part, monkeypatch)
        for row in range(0, len(found), max(len(found) // 20, 1)):
            chosen = labels.chosen(found, np.array([row]))
            own = part_costs(part, tuple(int(chosen[variable][0]) for variable in range(len(part.sizes))))
            assert own == pytest.approx(found.points[row])
            told += 1
    assert told > 500


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps, and what they call that is put in their place."""
    for function in ("eliminated_labels", "_sides", "_within", "_loss", "_smallest_first"):
        monkeypatch.setattr(compiled_parts, function, getattr(compiled_parts, function).py_func)


def within_less(given: Any, *rest: Any) -> Any:
    """Of what is like a table only its own outside counts."""
    own = np.arange(len(given.first))
    return WITHIN(given._replace(first=own), *rest)


def nearer(given: Any, *rest: Any) -> Any:
    """The peak weighs all it has in every table."""
    return WITHIN(given._replace(shares=np.ones(len(given.shares))), *rest)


def of_one(given: Any, wanted: Any, tables: Any, room: Any, made: int, which: int) -> Any:
    """A table meets itself."""
    return SIDE(given, wanted, tables, room, made, 0)


WITHIN, SIDE, LOSS = compiled_parts._within, compiled_parts._side, compiled_parts._loss


@pytest.mark.parametrize(
    ("name", "broken"), [("_within", within_less), ("_within", nearer), ("_side", of_one)]
)
def test_a_broken_step_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any]
) -> None:
    in_python(monkeypatch)
    assert agree(range(2), monkeypatch)
    monkeypatch.setattr(compiled_parts, name, broken)
    assert not agree(range(30), monkeypatch)


def test_what_is_lost_in_one_go_is_no_more_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eliminate, "MANY", 0)
    for found in (
        [lost_in_a_part(seed) for seed in range(30)],
        [lost_in_a_braid(seed) for seed in range(12)],
    ):
        assert sum(left_out for left_out, _ in found) > 40
        assert all(is_matched for _, is_matched in found)


def all_each_time(given: Any, wanted: Any, losing: Any, made: int, part: float, *rest: Any) -> Any:
    """Each step loses all, whatever was lost before."""
    return LOSS(given, wanted, losing, made, 1.0, *rest)


def no_potential(given: Any, wanted: Any, losing: Any, *rest: Any) -> Any:
    """Excesses leave out what else there is."""
    return LOSS(given, wanted, losing._replace(potentials=np.zeros_like(losing.potentials)), *rest)


@pytest.mark.parametrize("broken", [all_each_time, no_potential])
def test_losses_in_one_go_that_add_up_to_too_much_are_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(eliminate, "MANY", 0)
    in_python(monkeypatch)
    assert all(lost_in_a_braid(seed)[1] for seed in range(2))
    monkeypatch.setattr(compiled_parts, "_loss", broken)
    assert not all(lost_in_a_braid(seed)[1] for seed in range(40))


@pytest.mark.parametrize("limit", ["MOST_PAIRS", "MOST_LABELS"])
def test_too_many_labels_are_told(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(flat_labels, limit, 1)
    monkeypatch.setattr(flat_labels, "LABELS_PER_CELL", 0)
    with pytest.raises(TooManyLabels):
        two_ways(0, knot(0), monkeypatch)


def test_where_a_table_is_on_more_than_it_meets_steps_are_taken_one_by_one() -> None:
    costs = np.zeros((2, 5))
    part = Part(("a", "b"), (2, 2), (Factor((0,), costs),), entry=0, exit=1)
    assert not flat_labels.is_plain(order_of(part))
    scalars = Scalars.of(part, order_of(part), np.ones((1, 5)))
    assert flat_labels.is_plain(order_of(braid(0)))
    scalars.spread(np.zeros_like(scalars.last))
    # Of the exit, which nothing is on, either choice is as good.
    assert sorted(eliminated(part, order_of(part), Limits(scalars, 1.0)).cells.tolist()) == [0, 1, 2, 3]


# What is known of costs that are equal


def are_told_rightly(seeds: range) -> tuple[int, bool]:
    """How many factors are said to be like earlier ones in parts and in what is left of them, and whether all
    of these are."""
    alike, is_right = 0, True
    for seed in seeds:
        random, part = np.random.default_rng(seed), braid(seed)
        is_kept = [random.random(size) < 0.6 for size in part.sizes]
        left = prune._part(part, [np.flatnonzero(kept) if kept.any() else np.array([0]) for kept in is_kept])
        for own in (part, left):
            for place, first in enumerate(own.likes):
                is_right = is_right and np.array_equal(own.factors[place].costs, own.factors[first].costs)
                alike += place != first
    return alike, is_right


def test_what_is_told_to_be_alike_is_so_in_what_is_left() -> None:
    alike, is_right = are_told_rightly(range(30))
    assert alike > 100 and is_right


def test_what_is_told_to_be_alike_whatever_is_left_of_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "firsts", lambda kinds: firsts(like for like, *_ in kinds))
    assert not are_told_rightly(range(30))[1]


def test_firsts_are_the_first_places_of_what_is_alike() -> None:
    assert firsts("abcab") == (0, 1, 2, 0, 1)


def test_some_of_the_weights_of_a_chain_are_as_if_alone() -> None:
    for seed in range(10):
        chain = hubbed_chain(seed)
        orders: list[list[Order]] = orders_of(chain)
        weights = np.random.default_rng(seed).uniform(0.0, 1.0, (4, 5))
        rows = np.array([2, 0], dtype=np.intp)
        whole = weighed(chain, orders, Weighing.without_peaks(chain, weights))
        alone = weighed(chain, orders, Weighing.without_peaks(chain, weights[rows]))
        some = whole.some(rows)
        assert some.least == pytest.approx(alone.least)
        for one, other in zip([*some.ahead, *some.behind], [*alone.ahead, *alone.behind], strict=True):
            assert one == pytest.approx(other)
        for own, others in zip(some.scalars, alone.scalars, strict=True):
            for one_part, other_part in zip(own, others, strict=True):
                for scalars in (one_part, other_part):
                    scalars.spread(np.zeros_like(scalars.last))
                for a, b in zip(one_part.through(), other_part.through(), strict=True):
                    assert a == pytest.approx(b)
