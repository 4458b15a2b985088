"""Stages that split the rows of a microbatch over two pools, against a twin that lists all plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.property.uneven_bounds import hold_bounds
from tests.property.uneven_twin import SEATED, drawn_to_braid, every_layout, least_s, with_braids
from tests.sampling import sample_of

from shardwise.cost import StagePrice
from shardwise.search import UnevenSpace, priced_again, search_uneven
from shardwise.search.uneven import braids, options
from shardwise.search.uneven.options import Pricing
from shardwise.search.uneven.result import result_of_uneven
from shardwise.search.uneven.space import Braid, Kind, devices_of

INSTANCES, FULL_INSTANCES = 6, 1_200
CHUNK = 6
BRAIDED = (46, 71, 88, 92, 126, 127)
"""Problems the best plan of which has such stages."""

FIGURES = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        last = FULL_INSTANCES if metafunc.config.getoption("--full") else INSTANCES
        metafunc.parametrize("first_seed", range(0, last, CHUNK))


def without_braids(space: UnevenSpace) -> UnevenSpace:
    return UnevenSpace(space.model, space.cluster, space.job, replace(space.limits, braid=1))


@cache
def expected(seed: int) -> float:
    """The twin's answer."""
    return least_s(drawn_to_braid(seed))


def is_the_twins(space: UnevenSpace, expected_s: float) -> bool:
    """Whether the search finds the least time of all plans, proves it, and prices the plan alike again."""
    outcome = search_uneven(space)
    if outcome.plan is None:
        return expected_s == float("inf")
    found = result_of_uneven(space, outcome.plan)
    again = priced_again(space.model, space.cluster, space.job, found)
    if again.faults:
        return False
    times = (outcome.plan.time_s, outcome.lower_bound_s, max(again.pipeline_s))
    return all(time_s == pytest.approx(expected_s, rel=1e-9) for time_s in times)


def test_the_best_plan_is_that_of_the_twin(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + CHUNK):
        assert is_the_twins(drawn_to_braid(seed), expected(seed)), seed


@pytest.mark.parametrize("seed", sample_of(BRAIDED, BRAIDED[:3]))
def test_a_plan_with_such_stages_is_the_best_and_is_found(seed: int) -> None:
    space = drawn_to_braid(seed)
    assert is_the_twins(space, expected(seed))
    best, plain = search_uneven(space).plan, search_uneven(without_braids(space)).plan
    assert best is not None and plain is not None and best.time_s < plain.time_s * (1 - 1e-3)
    result = result_of_uneven(space, best)
    parts = [stage.parts for pipeline in result.layout.pipelines for stage in pipeline.stages if stage.parts]
    assert parts
    for one, other in parts:
        assert one.rows + other.rows == result.micro_batch_size
        assert one.device_class != other.device_class


def test_what_such_a_stage_costs_is_what_its_slower_part_does() -> None:
    """The twin takes every braid by itself, part by part, from the prices of single stages."""
    for seed in range(0, 40, 8):
        space = drawn_to_braid(seed)
        for block in (block for block in space.blocks() if space.pairs(block)):
            one = replace(block, least=block.most)
            mine = Pricing(space).options(one)
            theirs = with_braids(space, Pricing(without_braids(space)).options(one), one)
            assert mine.sites == theirs.sites and len(mine.sites) > len(mine.pools)
            for site in range(len(mine.pools), len(mine.sites)):
                stages, twins = mine.stages[site], theirs.stages[site]
                assert stages.kinds == twins.kinds
                fits = np.isfinite(twins.backward_s)
                assert (np.isfinite(stages.backward_s) == fits).all()
                for name in FIGURES:
                    both = (getattr(one, name) for one in (stages, twins))
                    found, expected = (np.squeeze(of, 1) if name in SEATED else of for of in both)
                    found, expected = found[fits], expected[fits]
                    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
                np.testing.assert_allclose(mine.hops[site].far_s, theirs.hops[site].far_s, rtol=1e-12)


def test_no_layout_takes_less_than_its_bounds(full: bool) -> None:
    held = 0
    for seed in range(40 if full else 12):
        space, rng = drawn_to_braid(seed), random.Random(seed)
        block = rng.choice([block for block in space.blocks() if space.pairs(block)] or space.blocks())
        of = Pricing(space).options(replace(block, least=block.most))
        numbers = range(1, of.microbatches + 1)
        for every in every_layout(of):
            braided = np.flatnonzero((every.pools >= len(of.pools)).any(axis=1)).tolist()
            some = every.take(np.array(rng.sample(braided, min(len(braided), 5)), dtype=int))
            hold_bounds(of, some, numbers, seed)
            held += len(some.pools)
    assert held > 50


SOUND = [(Pricing, "_part", Pricing._part)] + [
    (options, name, getattr(options, name)) for name in ("price_of_braids", "devices_of", "hops_of_braids")
]
"""What twins are put in the place of: the twin of the search is asked with these."""


def _of_the_first_part(one: braids.Part, other: braids.Part) -> Any:
    def idle(values: Any) -> Any:
        return 0.0 * np.asarray(values)

    price = StagePrice(**{field.name: idle(getattr(other.price, field.name)) for field in fields(StagePrice)})
    return braids.price_of_braids(one, replace(other, price=price))


def _on_the_first_pool(kind: Kind | Braid) -> tuple[int, ...]:
    return (kind.tp[0], 0) if isinstance(kind, Braid) else devices_of(kind)


def _at_once(one: braids.Part, other: braids.Part) -> Any:
    return 0.0 * braids.hops_of_braids(one, other)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("price_of_braids", _of_the_first_part),
        ("devices_of", _on_the_first_pool),
        ("hops_of_braids", _at_once),
    ],
    ids=["the slower part", "devices of both pools", "hops"],
)
def test_what_is_left_out_of_such_stages_is_noticed(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, name, broken)
    assert any(_is_too_soon(seed) for seed in BRAIDED)


def _is_too_soon(seed: int) -> bool:
    found = search_uneven(drawn_to_braid(seed)).plan
    with pytest.MonkeyPatch.context() as sound:
        for owner, name, own in SOUND:
            sound.setattr(owner, name, own)
        expected_s = expected(seed)
    return found is not None and found.time_s < expected_s * (1 - 1e-6)


def test_rows_that_no_part_does_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is priced by nobody: what comes out is sooner done than any plan."""
    own = Pricing._part

    def without_a_row(self: Pricing, block: Any, pool: int, rows: int, shape: Any) -> Any:
        return own(self, block, pool, max(rows - 1, 1), shape)

    monkeypatch.setattr(Pricing, "_part", without_a_row)
    assert any(_is_too_soon(seed) for seed in BRAIDED)
