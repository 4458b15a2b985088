"""Blocks of several pipelines against the twin: there gradients tell, which a single pipeline has none of."""

from __future__ import annotations

import random
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.property.uneven_twin import drawn_space, every_layout, least_of_block

from shardwise.search.uneven import Block, bounds, grown, partitions
from shardwise.search.uneven.block import search_of
from shardwise.search.uneven.options import Options, Pricing

SEEDS, FULL_SEEDS = 200, 3000
EFFORT = 1000
SAME = 1e-9


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        last = FULL_SEEDS if metafunc.config.getoption("--full") else SEEDS
        metafunc.parametrize("seeds", [range(first, first + 100) for first in range(0, last, 100)])


@cache
def drawn(seed: int) -> tuple[Options, Block, float]:
    """Two or more pipelines on all pools, alike ones in a third of the blocks, and their least time."""
    rng = random.Random(seed)
    space = drawn_space(seed, 4 if seed % 4 else 8)
    size = rng.choice(space.micro_batch_sizes[:-1])
    pools, total = tuple(range(len(space.pools))), space.job.global_batch_size // size
    devices = sum(pool.devices for pool in space.pools)
    number = rng.randint(2, max(min(3, total, devices), 2))
    block = Block(pools=pools, micro_batch_size=size, least=number, most=number, is_alike=not seed % 3)
    options = Pricing(space).options(block)
    layouts = every_layout(options)
    return options, block, least_of_block(options, layouts, block)


def is_found(seed: int) -> bool:
    """Whether the search reaches the least time, and shows that none is less."""
    options, block, least_s = drawn(seed)
    if not np.isfinite(least_s):
        return search_of(options, block, EFFORT).within(1e6) is None
    found = search_of(options, block, EFFORT).within(least_s * (1 + SAME))
    search = search_of(options, block, EFFORT)
    return found is not None and search.within(least_s * (1 - SAME)) is None and not search.gave_up


def test_the_least_time_of_a_block_is_that_of_the_twin(seeds: range) -> None:
    assert [seed for seed in seeds if not is_found(seed)] == []


@pytest.mark.parametrize("module", [bounds, grown])
def test_ends_of_a_step_that_are_too_long_lose_plans(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = module.ended_s

    def raised(*figures: Any) -> Any:
        return 1.05 * sound(*figures)

    monkeypatch.setattr(module, "ended_s", raised)
    monkeypatch.setattr(partitions, "moved", lambda *_: ())
    assert not all(is_found(seed) for seed in range(20))
