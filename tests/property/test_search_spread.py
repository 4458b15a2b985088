"""Spread stages, on nodes full of their replicas: plans with them compared with a twin that lists
all plans.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.property.uneven_bounds import assert_bounds_hold
from tests.property.uneven_reference import every_layout, least_s, random_to_spread
from tests.sampling import sample_of

from shardwise.search import UnevenSpace
from shardwise.search.hetero import UnevenPlan, predict_record, search_uneven
from shardwise.search.hetero.result import uneven_record
from shardwise.search.hetero.space import StageSpread, shapes_of
from shardwise.search.hetero.stage_costs import StageCostModel

INSTANCES, FULL_INSTANCES = 8, 1200
CHUNK = 4

BEST = (16, 21, 37, 51)
"""Seeds whose best plan has spread stages."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        last = FULL_INSTANCES if metafunc.config.getoption("--full") else INSTANCES
        metafunc.parametrize("first_seed", range(0, last, CHUNK))


@cache
def expected_s(seed: int) -> float:
    return least_s(random_to_spread(seed))


def equals_the_twin(seed: int) -> bool:
    """Whether the search finds the twin's time, and predicts its record equally."""
    space = random_to_spread(seed)
    least = pytest.approx(expected_s(seed), rel=1e-9)
    outcome = search_uneven(space)
    if outcome.plan is None:
        return expected_s(seed) == float("inf")
    again = predict_record(space.model, space.cluster, space.job, uneven_record(space, outcome.plan))
    found = outcome.plan.time_s, outcome.lower_bound_s, max(again.pipeline_s, default=0.0)
    return not again.faults and all(one == least for one in found)


def is_spread(space: UnevenSpace, plan: UnevenPlan) -> bool:
    """Whether any stage of the plan is spread."""
    spread = StageCostModel(space).options(plan.subproblem).spread
    counted = [([site for site, _ in one.stages], one.kinds) for one in plan.pipelines]
    return any(
        (how := spread[site][kinds[site]]) is not None and how.has_effect(sites.count(site))
        for sites, kinds in counted
        for site in sites
    )


@pytest.mark.slow
def test_the_best_plan_is_that_of_the_twin(first_seed: int) -> None:
    assert [seed for seed in range(first_seed, first_seed + CHUNK) if not equals_the_twin(seed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_of(BEST, BEST[:2]))
def test_the_best_plan_has_such_stages_and_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    space = random_to_spread(seed)
    assert equals_the_twin(seed)
    best = search_uneven(space).plan
    assert best is not None and is_spread(space, best)
    every = UnevenSpace.kinds
    monkeypatch.setattr(
        UnevenSpace,
        "kinds",
        lambda of, pool, size: tuple(one for one in every(of, pool, size) if of.spread(pool, one) is None),
    )
    laid = search_uneven(random_to_spread(seed)).plan
    assert laid is None or laid.time_s > best.time_s * (1 + 1e-3)


@pytest.mark.slow
def test_sets_that_fill_more_nodes_than_they_need_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [seed for seed in BEST if expected_s(seed) < float("inf")]
    sound = StageSpread.set_size
    monkeypatch.setattr(StageSpread, "set_size", lambda spread, stages: 2 * sound(spread, stages))
    shapes_of.cache_clear()
    found = [equals_the_twin(seed) for seed in known]
    shapes_of.cache_clear()
    assert not any(found)


@pytest.mark.slow
def test_no_layout_takes_less_than_its_bounds(full: bool) -> None:
    held = 0
    for seed in range(30 if full else 15):
        space, rng = random_to_spread(seed), random.Random(seed)
        subproblem = rng.choice(space.subproblems())
        of = StageCostModel(space).options(replace(subproblem, least=subproblem.most))
        numbers = range(1, of.microbatches + 1)
        for every in every_layout(of):
            spread: Any = np.flatnonzero(every.filling > 1).tolist()
            some = every.take(np.array(rng.sample(spread, min(len(spread), 5)), dtype=int))
            assert_bounds_hold(of, some, numbers, seed)
            held += len(some.pools)
    assert held > 50
