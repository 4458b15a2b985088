"""Random uneven plans with three estimates: by the search, by the twin, and from their record."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.property import uneven_reference
from tests.property.uneven_reference import Layouts, every_layout, random_space, walked_s

from shardwise.cost import NodeSlot
from shardwise.search import UnevenSpace
from shardwise.search.hetero import UnevenPipeline, UnevenPlan, placement, predict_record, record_costs
from shardwise.search.hetero.pipeline_search import pipeline_s
from shardwise.search.hetero.result import uneven_record
from shardwise.search.hetero.space import UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions

SEEDS, FULL_SEEDS = 50, 5000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        last = FULL_SEEDS if metafunc.config.getoption("--full") else SEEDS
        metafunc.parametrize("seeds", [range(first, first + 40) for first in range(0, last, 40)])


@cache
def random_uneven_plan(seed: int) -> tuple[UnevenSpace, UnevenPlan, StageOptions, Layouts] | None:
    """As many pipelines with the same stages as the devices allow, marked as identical pipelines in a third
    of the plans; None where nothing fits.
    """
    rng = random.Random(seed)
    space = random_space(seed, 8)
    size = rng.choice(space.micro_batch_sizes[:2])
    pools, total = tuple(range(len(space.pools))), space.job.global_batch_size // size
    subproblem = UnevenSubproblem(pools=pools, micro_batch_size=size, least=1, most=1)
    every = rng.choice(every_layout(StageCostModel(space).options(subproblem)))
    if not len(every.pools):
        return None
    spread = np.flatnonzero(every.filling > 1).tolist()
    one = every.take([rng.choice(spread if spread and not seed % 4 else range(len(every.pools)))])
    filling = int(one.filling[0])
    there = np.array([pool.devices for pool in space.pools])
    number = min(total, *(there[one.taken[0] > 0] // one.taken[0][one.taken[0] > 0]).tolist())
    number = number // filling * filling
    if not number:
        return None
    subproblem = replace(subproblem, least=number, most=number, is_alike=number > 1 and rng.random() < 1 / 3)
    options = StageCostModel(space).options(subproblem)
    of_pool = dict(zip(one.pools[0].tolist(), one.kinds[0].tolist(), strict=True))
    kinds = tuple(of_pool.get(pool, 0) for pool in pools)
    stages = tuple(zip(one.pools[0].tolist(), one.layers[0].tolist(), strict=True))
    shares = [total // number + (place < total % number) for place in range(number)]
    times = [pipeline_s(options, kinds, stages, share) for share in shares]
    if not np.isfinite(times).all():
        return None
    pipelines = tuple(
        UnevenPipeline(kinds=kinds, stages=stages, microbatches=share, time_s=time_s)
        for share, time_s in zip(shares, times, strict=True)
    )
    return space, UnevenPlan(subproblem=subproblem, pipelines=pipelines, time_s=max(times)), options, one


def agree(seed: int) -> bool:
    """Whether all three estimates agree; True without a plan."""
    found = random_uneven_plan(seed)
    if found is None:
        return True
    space, plan, options, one = found
    times = [pipeline.time_s for pipeline in plan.pipelines]
    walked = walked_s(options, one, [pipeline.microbatches for pipeline in plan.pipelines])[0]
    again = predict_record(space.model, space.cluster, space.job, uneven_record(space, plan))
    return (
        not again.faults
        and again.pipeline_s == pytest.approx(times, rel=1e-9)
        and walked.tolist() == pytest.approx(times, rel=1e-9)
    )


@pytest.mark.slow
def test_search_twin_and_record_give_random_plans_the_same_cost(seeds: range) -> None:
    assert [seed for seed in seeds if not agree(seed)] == []


def test_some_random_plans_have_stages_that_share_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the record and of the twin that treat every stage as alone in its node are noticed."""
    monkeypatch.setattr(record_costs.RecordCostModel, "_node_slot", lambda *_: NodeSlot())
    assert not all(agree(seed) for seed in range(SEEDS))
    monkeypatch.undo()
    monkeypatch.setattr(uneven_reference, "_node_slot", lambda *_: 0)
    assert not all(agree(seed) for seed in range(SEEDS))


@pytest.mark.slow
def test_some_random_plans_have_spread_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant lets nodes hold as many stages of a pipeline as fit."""
    monkeypatch.setattr(placement, "_share_nodes", lambda *_: True)
    assert not all(agree(seed) for seed in range(SEEDS))
