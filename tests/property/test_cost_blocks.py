"""No bound of a subproblem exceeds the cost of a strategy in it: time, memory on devices and hosts, layer
capacity.

Random strategies come from real and odd models on odd clusters, and are moved towards the least time and the
least memory of their subproblems, where bounds are closest. Of small instances all strategies are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.property.cost_level_bounds import (
    Bounds,
    capacities,
    least_device_bytes,
    least_hosts_bytes,
    least_times_s,
)
from tests.property.cost_levels import FULL, Levels
from tests.property.cost_samples import CASES, descended, odd_problem, problem_of, sampled, space_of
from tests.property.search_instances import RARELY, instance
from tests.property.search_space_reference import first_reason

from shardwise.cost import (
    Index,
    Problem,
    Split,
    end_s,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    outside_schedule_s,
    peaks_of,
)
from shardwise.cost.bounds import capacity
from shardwise.cost.memory import PeakBytes
from shardwise.search.step_times import pipeline_makespan_s, step_times_s
from shardwise.strategy import SCHEDULES, StrategyTable

TOLERANCE = 1e-12
ODD, FULL_ODD = 2, 400
ONCE_WRONG = (108,)
"""Seeds of odd problems with a bound that was once too high: two collectives overlap with the same
matmuls.
"""
ROWS = 240
ROUNDS, FULL_ROUNDS = 6, 16
OFTEN = (0, 3, 4, 7, 8, 10, 11)
"""Indices of the cases that a run without `--full` takes: dense and routed, latent attention and windows, six
and twelve devices, mixed classes, low precision, other software, a backend without reduce-scatter.
"""
SMALL = (3, 29, 71, 126, 1626, 9771)
"""Seeds of small instances: stages of one or two layers, few micro-batches, layers of two kinds."""
FULL_SMALL = tuple(seed for seed in range(600) if seed % RARELY != 7)


@dataclass(frozen=True)
class Sample:
    """Strategies with their subproblems, their evaluated times and their exact memory."""

    levels: Levels
    times_s: Any
    peaks: PeakBytes


def sample_from(problem: Problem, seed: int, rounds: int = ROUNDS) -> Sample:
    space = space_of(problem, "core" if seed % 7 == 6 else "default")
    table = sampled(problem, ROWS, seed, space)
    fast = descended(problem, space, table, lambda rows: step_times_s(problem, rows), rounds)
    some = table.take(slice(0, ROWS // 3))
    small = descended(problem, space, some, lambda rows: peaks_of(problem, rows).device_bytes, rounds)
    both = type(table).joined([fast, small])
    return Sample(Levels(problem, space, both), step_times_s(problem, both), peaks_of(problem, both))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_full = metafunc.config.getoption("--full")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", sorted({*SMALL, *FULL_SMALL}) if is_full else SMALL)
    if "sample" in metafunc.fixturenames:
        odd = FULL_ODD if is_full else ODD
        cases = range(len(CASES)) if is_full else OFTEN
        odds = [*range(odd), *(seed for seed in ONCE_WRONG if seed >= odd)]
        seeds = [*(place - len(CASES) for place in cases), *odds]
        sample = [
            pytest.param(
                seed,
                id=str(CASES[seed]) if seed < 0 else f"odd {seed}",
                marks=pytest.mark.xdist_group(f"sample {seed}"),  # by one worker, which samples once
            )
            for seed in seeds
        ]
        metafunc.parametrize("sample", sample, indirect=True, scope="module")


@pytest.fixture(scope="module")
def sample(request: pytest.FixtureRequest) -> Sample:
    seed: int = request.param
    rounds = FULL_ROUNDS if request.config.getoption("--full") else ROUNDS
    return sample_from(problem_of(CASES[seed]) if seed < 0 else odd_problem(seed), abs(seed), rounds)


def exceeding(bounds: Bounds, values: Any, factor: float = 1.0) -> dict[str, list[int]]:
    """Rows, by name, whose bound times a factor exceeds their cost."""
    found = {
        name: np.flatnonzero(factor * least > values * (1.0 + TOLERANCE)) for name, least in bounds.items()
    }
    return {name: rows.tolist() for name, rows in found.items() if len(rows)}


def lacking_capacity(sample: Sample) -> set[tuple[str, str]]:
    """Kinds of layer capacity, by level, that are too small for a row in its own memory and time."""
    limit_s, usable_bytes = (1.0 + TOLERANCE) * sample.times_s, (1.0 + TOLERANCE) * sample.peaks.device_bytes
    found = set()
    for name, has in capacities(sample.levels, limit_s, usable_bytes).items():
        found |= {(name, "memory")} if not has.fits.all() else set()
        found |= {(name, "both")} if not has.is_enough.all() else set()
    for name, has in capacities(sample.levels, limit_s, np.full(len(limit_s), 1e30)).items():
        found |= {(name, "time")} if not has.is_enough.all() else set()
    return found


def with_least_end_s(levels: Levels) -> Any:
    """The pipeline makespan of each row plus a lower bound of the end of its step. Leaves use a subproblem's
    bound without its end as a bound of the makespan and add their own ends: that must hold too.
    """
    rows, problem = levels.all_rows, levels.problem
    states = levels.table.replaced(optim_shard=levels.states(rows))
    block, totals, _ = levels.recomputed(rows)
    return pipeline_makespan_s(problem, states) + end_s(problem, block, totals)


@pytest.mark.slow
def test_no_subproblem_takes_less_than_its_bound(sample: Sample) -> None:
    bounds = least_times_s(sample.levels)
    assert exceeding(bounds, sample.times_s) == {}
    assert exceeding(bounds, with_least_end_s(sample.levels)) == {}


def test_no_subproblem_of_a_small_instance_takes_less_than_its_bound(seed: int) -> None:
    case = instance(seed)
    problem = case.question.problem()
    legal = [each for each in case.candidates() if first_reason(each, problem.limits) is None]
    levels = Levels(problem, case.space, StrategyTable.of(legal))
    assert exceeding(least_times_s(levels), with_least_end_s(levels)) == {}


def test_no_subproblem_needs_less_memory_than_its_bound(sample: Sample) -> None:
    assert exceeding(least_device_bytes(sample.levels), sample.peaks.device_bytes) == {}
    assert exceeding(least_hosts_bytes(sample.levels), sample.peaks.host_bytes) == {}


@pytest.mark.slow
def test_candidates_within_the_time_have_capacity(sample: Sample) -> None:
    assert lacking_capacity(sample) == set()


def test_a_pipeline_and_its_surroundings_take_no_longer_than_the_step(sample: Sample) -> None:
    problem, table = sample.levels.problem, sample.levels.table
    states = table.replaced(optim_shard=sample.levels.states(sample.levels.all_rows))
    least = pipeline_makespan_s(problem, states) + outside_schedule_s(problem, table)
    assert exceeding({"leaf": least}, sample.times_s) == {}
    assert len(exceeding({"leaf": least}, sample.times_s, 1.01)["leaf"]) > len(table) / 3


def test_memory_falls_with_every_recomputed_layer(sample: Sample) -> None:
    """The search for the fewest recomputed layers that fit is a bisection, so it needs monotone memory."""
    levels, rows = sample.levels, np.flatnonzero(sample.levels.table.recompute == FULL)
    for level in (levels.scheduled, levels.divided):
        block, totals, _ = level(rows)
        layer_counts, last = layer_counts_of(block), np.full(len(rows), np.inf)
        for layers in range(1, min(int(np.max(block.split.largest)), 8) + 1):
            tried = replace(block, recompute_layers=np.minimum(layers, block.split.largest))
            now = lower_bound_bytes(levels.problem, tried, layer_counts, totals)
            assert (now <= last).all()
            last = now


def test_nodes_with_options_have_the_bounds_of_each_option(sample: Sample) -> None:
    """The search bounds nodes (rows) with splits (columns) in one call."""
    levels = sample.levels
    for rows in list(levels.groups("pp", "vpp", "schedule"))[:12]:
        block, totals, traffic = levels.divided(rows)
        alone = lower_bound_s(levels.problem, block, layer_counts_of(block), totals, traffic)
        down: dict[str, Any] = {
            name: np.asarray(getattr(block, name))[:, None]
            for name in block.__dataclass_fields__
            if name not in ("split", "recompute_layers", "recompute_most", "is_open")
        }
        across: dict[str, Any] = {
            name: np.asarray(getattr(block, name))[None] for name in ("recompute_layers", "recompute_most")
        }
        parts = ("first", "last", "between", "largest")
        split = Split(*(np.asarray(getattr(block.split, name))[None] for name in parts))
        cells = replace(block, split=split, **down, **across)
        grids, of_grid = levels.grids
        some = (grids.totals_at(of_grid[rows][:, None]), traffic.taken(np.arange(len(rows))[:, None]))
        together = lower_bound_s(levels.problem, cells, layer_counts_of(cells), *some)
        np.testing.assert_allclose(np.diagonal(together), alone, rtol=TOLERANCE)


# Mutants.

SAMPLED_ONCE = pytest.mark.xdist_group("several")
"""By one worker, which samples once."""


@pytest.fixture(scope="module")
def several() -> list[Sample]:
    """Some of the samples above."""
    real = [sample_from(problem_of(CASES[place]), seed) for place, seed in ((0, 9), (1, 8), (6, 3))]
    return real + [sample_from(odd_problem(seed), seed) for seed in (0, 2, 3)]


BOUND_FACTORS = {"any micro batch": 1.05, "computation alone": 1.5, "sharded": 1.1, "family": 1.1}
"""Factors by which bounds that are not tight are raised, so that the mutant is caught; 1.01 for the
others.
"""


@pytest.mark.slow
@SAMPLED_ONCE
def test_bounds_of_time_that_are_a_little_too_high_are_caught(several: list[Sample]) -> None:
    missed = set(least_times_s(several[0].levels))
    for sample in several:
        for name, bound in least_times_s(sample.levels).items():
            factor = BOUND_FACTORS[name] if name in ("any micro batch", "computation alone") else 1.01
            missed -= set(exceeding({name: bound}, sample.times_s, factor))
    assert missed == set()


@pytest.mark.slow
@SAMPLED_ONCE
def test_bounds_of_memory_that_are_a_little_too_high_are_caught(several: list[Sample]) -> None:
    missed = {("device", name) for name in least_device_bytes(several[0].levels)}
    missed |= {("host", name) for name in least_hosts_bytes(several[0].levels)}
    for sample in several:
        for name, bound in least_device_bytes(sample.levels).items():
            for caught in exceeding({name: bound}, sample.peaks.device_bytes, BOUND_FACTORS.get(name, 1.01)):
                missed -= {("device", caught)}
        for caught in exceeding(least_hosts_bytes(sample.levels), sample.peaks.host_bytes, 1.01):
            missed -= {("host", caught)}
    assert missed == set()


@SAMPLED_ONCE
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_of_each_schedule_that_are_too_high_are_caught(several: list[Sample], schedule: str) -> None:
    """The mutant adds a tenth to every pipeline of one schedule."""
    caught = 0
    for sample in several:
        table = sample.levels.table
        mine = np.flatnonzero((table.schedule == SCHEDULES.index(schedule)) & (table.pp > 1))
        if len(mine):
            caught += int((1.1 * block_s(sample.levels, mine) > sample.times_s[mine]).sum())
    assert caught > 0


def block_s(levels: Levels, rows: Index) -> Any:
    """The bounds of subproblems whose splits and recomputed layers are fixed."""
    block, totals, traffic = levels.recomputed(rows)
    return lower_bound_s(levels.problem, block, layer_counts_of(block), totals, traffic)


@pytest.mark.slow
@SAMPLED_ONCE
def test_a_layer_less_of_capacity_is_caught(several: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "ROUNDING", -1.0)
    found: set[tuple[str, str]] = set()
    for sample in several:
        found |= lacking_capacity(sample)
    levels = ("recompute_chosen", "open family", "sharded", "family", "schedule", "schedule alone")
    expected = {(name, kind) for name in levels for kind in ("memory", "time", "both")}
    assert found >= expected | {("tight schedule", "memory")}
