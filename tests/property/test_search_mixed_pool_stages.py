"""Mixed-pool stages, which split the rows of a micro-batch over two pools, compared with a twin that lists
all plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.property.uneven_bounds import assert_bounds_hold
from tests.property.uneven_reference import (
    BY_NODE_SLOT,
    every_layout,
    least_s,
    random_with_mixed_stages,
    with_mixed_stages,
)
from tests.sampling import sample_of

from shardwise.cost import StageBytes, StageCosts
from shardwise.search import UnevenSpace
from shardwise.search.hetero import predict_record, search_uneven, stage_costs
from shardwise.search.hetero.result import uneven_record
from shardwise.search.hetero.space import MixedPoolKind, StageKind, devices_by_pool
from shardwise.search.hetero.stage_costs import StageCostModel

INSTANCES, FULL_INSTANCES = 6, 1_200
CHUNK = 6
WITH_MIXED_STAGES = (46, 71, 88, 92, 126, 127, 169, 332)
"""Problems whose best plan has mixed-pool stages; in the last two, messages between stages decide."""

FIGURES = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        last = FULL_INSTANCES if metafunc.config.getoption("--full") else INSTANCES
        metafunc.parametrize("first_seed", range(0, last, CHUNK))


def without_mixed_stages(space: UnevenSpace) -> UnevenSpace:
    return UnevenSpace(space.model, space.cluster, space.job, replace(space.limits, mixed_stage_rows=1))


@cache
def expected(seed: int) -> float:
    """The twin's answer."""
    return least_s(random_with_mixed_stages(seed))


def equals_the_twin(space: UnevenSpace, expected_s: float) -> bool:
    """Whether the search finds the least time of all plans, proves it, and predicts the plan's record
    equally.
    """
    outcome = search_uneven(space)
    if outcome.plan is None:
        return expected_s == float("inf")
    found = uneven_record(space, outcome.plan)
    again = predict_record(space.model, space.cluster, space.job, found)
    if again.faults:
        return False
    times = (outcome.plan.time_s, outcome.lower_bound_s, max(again.pipeline_s))
    return all(time_s == pytest.approx(expected_s, rel=1e-9) for time_s in times)


@pytest.mark.slow
def test_the_best_plan_is_that_of_the_twin(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + CHUNK):
        assert equals_the_twin(random_with_mixed_stages(seed), expected(seed)), seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_of(WITH_MIXED_STAGES, WITH_MIXED_STAGES[:3]))
def test_the_best_plan_has_such_stages_and_is_found(seed: int) -> None:
    space = random_with_mixed_stages(seed)
    assert equals_the_twin(space, expected(seed))
    best, plain = search_uneven(space).plan, search_uneven(without_mixed_stages(space)).plan
    assert best is not None and plain is not None and best.time_s < plain.time_s * (1 - 1e-3)
    result = uneven_record(space, best)
    parts = [stage.parts for pipeline in result.layout.pipelines for stage in pipeline.stages if stage.parts]
    assert parts
    for one, other in parts:
        assert one.rows + other.rows == result.micro_batch_size
        assert one.device_class != other.device_class


@pytest.mark.slow
def test_a_mixed_pool_stage_costs_as_its_slower_part() -> None:
    """The twin estimates both parts of every mixed-pool stage separately, from the costs of single stages."""
    for seed in range(0, 40, 8):
        space = random_with_mixed_stages(seed)
        for subproblem in (subproblem for subproblem in space.subproblems() if space.pairs(subproblem)):
            one = replace(subproblem, least=subproblem.most)
            mine = StageCostModel(space).options(one)
            theirs = with_mixed_stages(space, StageCostModel(without_mixed_stages(space)).options(one), one)
            assert mine.sites == theirs.sites and len(mine.sites) > len(mine.pools)
            for site in range(len(mine.pools), len(mine.sites)):
                stages, twins = mine.stages[site], theirs.stages[site]
                assert stages.kinds == twins.kinds
                fits = np.isfinite(twins.backward_s)
                assert (np.isfinite(stages.backward_s) == fits).all()
                for name in FIGURES:
                    both = (getattr(one, name) for one in (stages, twins))
                    found, expected = (np.squeeze(of, 1) if name in BY_NODE_SLOT else of for of in both)
                    found, expected = found[fits], expected[fits]
                    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
                np.testing.assert_allclose(mine.hops[site].far_s, theirs.hops[site].far_s, rtol=1e-12)


@pytest.mark.slow
def test_no_layout_takes_less_than_its_bounds(full: bool) -> None:
    held = 0
    for seed in range(40 if full else 12):
        space, rng = random_with_mixed_stages(seed), random.Random(seed)
        subproblem = rng.choice(
            [subproblem for subproblem in space.subproblems() if space.pairs(subproblem)]
            or space.subproblems()
        )
        of = StageCostModel(space).options(replace(subproblem, least=subproblem.most))
        numbers = range(1, of.microbatches + 1)
        for every in every_layout(of):
            mixed = np.flatnonzero((every.pools >= len(of.pools)).any(axis=1)).tolist()
            some = every.take(np.array(rng.sample(mixed, min(len(mixed), 5)), dtype=int))
            assert_bounds_hold(of, some, numbers, seed)
            held += len(some.pools)
    assert held > 50


SOUND = [(StageCostModel, "_part", StageCostModel._part)] + [
    (stage_costs, name, getattr(stage_costs, name))
    for name in ("mixed_pool_cost", "devices_by_pool", "mixed_pool_hops")
]
"""The original functions that mutants replace: the twin of the search is computed with these."""


MIXED_POOL_COST, MIXED_POOL_HOPS = stage_costs.mixed_pool_cost, stage_costs.mixed_pool_hops


def _of_the_first_part(one: stage_costs.PoolPart, other: stage_costs.PoolPart) -> Any:
    def idle(values: Any) -> Any:
        return 0.0 * np.asarray(values)

    price = StageCosts(**{field.name: idle(getattr(other.price, field.name)) for field in fields(StageCosts)})
    nbytes = StageBytes(idle(other.nbytes.allocated), idle(other.nbytes.device))
    return MIXED_POOL_COST(one, replace(other, price=price, nbytes=nbytes))


def _on_the_first_pool(kind: StageKind | MixedPoolKind) -> tuple[int, ...]:
    return (kind.tp[0], 0) if isinstance(kind, MixedPoolKind) else devices_by_pool(kind)


def _at_once(one: stage_costs.PoolPart, other: stage_costs.PoolPart) -> Any:
    return 0.0 * MIXED_POOL_HOPS(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("mixed_pool_cost", _of_the_first_part),
        ("devices_by_pool", _on_the_first_pool),
        ("mixed_pool_hops", _at_once),
    ],
    ids=["the slower part", "devices of both pools", "hops"],
)
def test_omissions_in_mixed_pool_stages_are_noticed(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_costs, name, broken)
    assert any(_is_faster_than_every_plan(seed) for seed in WITH_MIXED_STAGES)


def _is_faster_than_every_plan(seed: int) -> bool:
    found = search_uneven(random_with_mixed_stages(seed)).plan
    with pytest.MonkeyPatch.context() as sound:
        for owner, name, own in SOUND:
            sound.setattr(owner, name, own)
        expected_s = expected(seed)
    return found is not None and found.time_s < expected_s * (1 - 1e-6)


def test_rows_that_no_part_computes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant leaves out one row of a stage: its answer is faster than any plan."""
    own = StageCostModel._part

    def without_a_row(self: StageCostModel, subproblem: Any, pool: int, rows: int, shape: Any) -> Any:
        return own(self, subproblem, pool, max(rows - 1, 1), shape)

    monkeypatch.setattr(StageCostModel, "_part", without_a_row)
    assert any(_is_faster_than_every_plan(seed) for seed in WITH_MIXED_STAGES)
