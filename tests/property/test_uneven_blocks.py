"""Subproblems of several pipelines compared with the twin: gradient reduction counts there, which a single
pipeline does not have.
"""

from __future__ import annotations

import random
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.property.uneven_reference import every_layout, least_of_subproblem, random_space

from shardwise.search.hetero import lower_bounds, pipeline_search
from shardwise.search.hetero.space import UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions
from shardwise.search.hetero.subproblem import subproblem_search

SEEDS, FULL_SEEDS = 200, 3000
EFFORT = 1000
SAME = 1e-9


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        last = FULL_SEEDS if metafunc.config.getoption("--full") else SEEDS
        metafunc.parametrize("seeds", [range(first, first + 100) for first in range(0, last, 100)])


@cache
def random_subproblem(seed: int) -> tuple[StageOptions, UnevenSubproblem, float]:
    """Two or more pipelines on all pools, identical ones in a third of the subproblems, and their
    least time.
    """
    rng = random.Random(seed)
    space = random_space(seed, 4 if seed % 4 else 8)
    size = rng.choice(space.micro_batch_sizes[:-1])
    pools, total = tuple(range(len(space.pools))), space.job.global_batch_size // size
    devices = sum(pool.devices for pool in space.pools)
    number = rng.randint(2, max(min(3, total, devices), 2))
    subproblem = UnevenSubproblem(
        pools=pools, micro_batch_size=size, least=number, most=number, is_alike=not seed % 3
    )
    options = StageCostModel(space).options(subproblem)
    layouts = every_layout(options)
    return options, subproblem, least_of_subproblem(options, layouts, subproblem)


def is_found(seed: int) -> bool:
    """Whether the search reaches the least time, and proves that no plan is faster."""
    options, subproblem, least_s = random_subproblem(seed)
    if not np.isfinite(least_s):
        return subproblem_search(options, subproblem, EFFORT).within(1e6) is None
    found = subproblem_search(options, subproblem, EFFORT).within(least_s * (1 + SAME))
    search = subproblem_search(options, subproblem, EFFORT)
    return found is not None and search.within(least_s * (1 - SAME)) is None and not search.was_truncated


@pytest.mark.slow
def test_the_least_time_of_a_subproblem_is_that_of_the_twin(seeds: range) -> None:
    assert [seed for seed in seeds if not is_found(seed)] == []


@pytest.mark.parametrize("module", [lower_bounds, pipeline_search])
def test_a_bound_with_too_long_step_ends_loses_plans(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = module.completion_lower_bound_s

    def too_high(*figures: Any) -> Any:
        return 1.05 * sound(*figures)

    monkeypatch.setattr(module, "completion_lower_bound_s", too_high)
    monkeypatch.setattr(pipeline_search, "local_search", lambda *_: ())
    assert not all(is_found(seed) for seed in (*range(20), 38, 52))
