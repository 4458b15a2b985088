"""No candidate of a cell is faster or smaller than the cell's floors say, at any level of a cover."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.property.check_cells import LEVELS, opened, pipelines_of, widened
from tests.property.cost_samples import (
    CASES,
    Case,
    descended,
    odd_problem,
    problem_of,
    sampled,
    space_of,
)
from tests.property.test_check_evaluator import figures_for, legal_strategies

from shardwise.check.bytes_floor import bytes_floor
from shardwise.check.cells import Cells, Pipeline
from shardwise.check.price import Evaluation, evaluate
from shardwise.check.rows import rows_of
from shardwise.check.schedules import table_of
from shardwise.check.time_floor import time_floor, work_floor
from shardwise.check.turns import empty_family, turns_of
from shardwise.cost import Problem, bind
from shardwise.search.evaluate import step_times_s
from shardwise.strategy import Strategy

ROWS, ALL_ROWS = 40, 4_000
FEW_ROWS = 50
HIDING, ALL_HIDING = 6, 300
FAST_ROWS, ROUNDS = 60, 8

ROUNDING = 1e-12

Floats = NDArray[np.float64]


Part = tuple[Pipeline, Cells, Evaluation]


@lru_cache(maxsize=len(CASES))
def evaluated(case: Case, count: int) -> tuple[Part, ...]:
    """Legal strategies of a case as cells of one point, with what each costs."""
    problem = problem_of(case)
    return tuple(as_cells(problem, legal_strategies(problem, count, seed=41)))


ALONE = [pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"floors {case}")) for case in CASES]
"""Each case by one worker, which evaluates it once."""


def as_cells(problem: Problem, strategies: Sequence[Strategy]) -> list[Part]:
    """Strategies of a problem as cells of one point, with what each costs."""
    figures = figures_for(problem)
    found = evaluate(figures, rows_of(list(strategies)))
    return [
        (pipeline, cells, Evaluation(*(column[places] for column in found)))
        for places, pipeline, cells in pipelines_of(figures, strategies)
    ]


def hiding_problem(seed: int) -> Problem:
    """An odd problem of which much is hidden: experts' and tensors' exchanges both beside the same matmuls,
    gradients, parameters, activations on their way to the host; at little or much slowdown."""
    rng, problem = random.Random(f"hiding {seed}"), odd_problem(2 * seed)

    def share() -> float:
        return rng.choice((rng.random(), 1.0))

    tensor = share()
    hiding = replace(
        problem.profile,
        tensor_overlap=tensor,
        tensor_backward_overlap=(1.0 - tensor) * share(),
        expert_overlap=share(),
        data_overlap=share(),
        state_overlap=share(),
        shard_overlap=share(),
        dispatch_s=rng.choice((0.0, problem.profile.dispatch_s)),
    )
    slowdown, of_link = rng.uniform(1.0, 2.0), 10.0 ** rng.uniform(-2.0, 2.0)
    classes = {
        name: replace(device, efficiency=replace(device.efficiency, overlap_slowdown=slowdown))
        for name, device in problem.cluster.classes.items()
    }
    nodes = tuple(
        replace(node, host_link_bytes_per_s=of_link * node.host_link_bytes_per_s)
        for node in problem.cluster.nodes
    )
    cluster = replace(problem.cluster, classes=classes, nodes=nodes)
    return bind(problem.model, cluster, replace(problem.job, profile=hiding))


def worst_of_hiding(seed: int) -> float:
    """The largest ratio of a floor to what it is a floor of, at any level, of fast strategies."""
    problem, rng, worst = hiding_problem(seed), random.Random(seed), 0.0
    space = space_of(problem)
    table = sampled(problem, FAST_ROWS, seed, space)
    fast = descended(problem, space, table, lambda rows: step_times_s(problem, rows), ROUNDS)
    for pipeline, cells, found in as_cells(problem, list(fast)):
        for box_cells in (cells, widened(pipeline, cells, rng), widened(pipeline, cells, rng)):
            for level in LEVELS:
                each = ratios(pipeline, opened(box_cells, level), level, found)
                worst = max(worst, *(float(ratio.max()) for ratio in each))
    return worst


def ratios(pipeline: Pipeline, cells: Cells, level: str, found: Evaluation) -> tuple[Floats, Floats, Floats]:
    """The floors of seconds, device bytes and host bytes, over what they are floors of."""
    is_paired, is_sharded = level in ("paired", "sharded"), level == "sharded"
    seconds = time_floor(pipeline, cells, is_paired=is_paired, is_sharded=is_sharded)
    if level == "open":
        return seconds / found.step_time_s, np.zeros(1), np.zeros(1)
    device, host = bytes_floor(pipeline, cells, cells.box.layers_high, is_paired=is_paired)
    return (
        seconds / found.step_time_s,
        device / found.device_bytes,
        host / np.maximum(found.host_bytes, 1.0),
    )


@pytest.mark.parametrize("case", ALONE)
def test_floors_are_floors(case: Case, full: bool) -> None:
    rng = random.Random(42)
    parts = evaluated(case, ALL_ROWS if full else ROWS)
    for pipeline, cells, found in parts:
        for box_cells in (cells, widened(pipeline, cells, rng), widened(pipeline, cells, rng)):
            for level in LEVELS:
                for ratio in ratios(pipeline, opened(box_cells, level), level, found):
                    assert ratio.max() <= 1 + ROUNDING, level


def worst_of_work(parts: Sequence[Part]) -> float:
    """The largest ratio of what all of a model's work takes, shared evenly, to the seconds of a step."""
    return max(
        float((work_floor(pipeline)[cells.grid] / found.step_time_s).max())
        for pipeline, cells, found in parts
    )


@pytest.mark.xdist_group("few floors")
def test_work_shared_evenly_is_a_floor_under_any_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """And near enough to what is evaluated that a single block counted twice would show."""
    parts = [part for case in CASES for part in evaluated(case, FEW_ROWS)]
    assert 0.8 < worst_of_work(parts) <= 1 + ROUNDING
    whole_model = Pipeline.whole_model

    def broken(pipeline: Pipeline, of_blocks: Floats) -> Floats:
        doubled: Floats = whole_model(pipeline, of_blocks) + of_blocks.max(axis=0)
        return doubled

    monkeypatch.setattr(Pipeline, "whole_model", broken)
    assert worst_of_work(parts) > 1.001


@pytest.mark.xdist_group("few floors")
def test_what_may_be_moved_takes_no_device_memory() -> None:
    """Where offload is open nothing that some choice of it moves counts: counted as if it stayed, the floor
    would be above what those take that move it."""
    worst = 0.0
    for case in CASES[:6]:
        for pipeline, cells, found in evaluated(case, FEW_ROWS):
            stays = replace(opened(cells, "recomputed"), offload=np.zeros(len(cells), dtype=np.int64))
            worst = max(worst, float(ratios(pipeline, stays, "recomputed", found)[1].max()))
    assert worst > 1.1


def test_floors_hold_whatever_is_hidden_beside_what(full: bool) -> None:
    for seed in range(ALL_HIDING if full else HIDING):
        assert worst_of_hiding(seed) <= 1 + ROUNDING, seed


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("_added_s", lambda seconds, overlap, action_s, buckets: seconds),
        ("_exposed_at_least_s", lambda pipeline, moved_s, computation_s: moved_s),
    ],
)
def test_a_floor_that_hides_too_little_is_caught(
    part: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reductions beside nothing; all activations of a model moved beside nothing."""
    monkeypatch.setattr(f"shardwise.check.time_floor.{part}", broken)
    assert any(worst_of_hiding(seed) > 1.0001 for seed in range(4))


@pytest.mark.parametrize("case", ALONE)
def test_floors_of_points_are_near(case: Case) -> None:
    """Bytes are exact there; times are exact on one rank, and near elsewhere."""
    parts = evaluated(case, ROWS)
    near = []
    for pipeline, cells, found in parts:
        seconds, device, host = ratios(pipeline, cells, "sharded", found)
        assert device.min() >= 1 - ROUNDING
        assert host[found.host_bytes > 0].min(initial=1.0) >= 1 - ROUNDING
        if pipeline.pp == 1:
            assert seconds.min() >= 1 - ROUNDING
        near += seconds.tolist()
    assert np.mean(near) > 0.96


def test_a_path_that_counts_forwards_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is for: a floor a little too high."""

    def broken(schedule: str, pp: int, vpp: int, microbatches: int) -> object:
        turns = turns_of(schedule, pp, vpp, microbatches)
        return replace(turns, before=np.maximum(turns.before - 1, 0))

    monkeypatch.setattr("shardwise.check.cells.turns_of", broken)
    worst = 0.0
    for case in CASES[:6]:
        for pipeline, cells, found in evaluated.__wrapped__(case, FEW_ROWS):
            worst = max(worst, float(ratios(pipeline, cells, "sharded", found)[0].max()))
    assert worst > 1.001


def test_every_schedule_turns_as_the_paths_take_it() -> None:
    """The first backward of a rank is of the first microbatch, its last forward of the last; and from 4 pp
    microbatches on only the middle grows."""
    for schedule, vpps in (
        ("1f1b", (1,)), ("gpipe", (1,)), ("zb_h1", (1,)), ("zb_h2", (1,)), ("zb_v", (2,)),
        ("dualpipe_v", (2,)), ("interleaved_1f1b", (2, 3, 5)),
    ):  # fmt: skip
        for pp in range(2, 8):
            for vpp in vpps:
                for m in (2 * pp, 4 * pp, 5 * pp, 9 * pp):
                    for row in table_of(empty_family(schedule, pp, vpp, m)):
                        backward = next(act for act in row if act[1] in "BI")
                        forward = [act for act in row if act[1] == "F"][-1]
                        assert backward[2] == 0 and forward[2] == m - 1
                if schedule != "gpipe":
                    few, many = (_exact_turns(schedule, pp, vpp, m) for m in (4 * pp, 9 * pp))
                    assert few == many


def _exact_turns(schedule: str, pp: int, vpp: int, m: int) -> list[tuple[object, ...]]:
    """What every row does before its first backward and after its last forward, without microbatches."""
    found: list[tuple[object, ...]] = []
    for row in table_of(empty_family(schedule, pp, vpp, m)):
        first = next(place for place, act in enumerate(row) if act[1] in "BI")
        last = max(place for place, act in enumerate(row) if act[1] == "F")
        found.append(
            (
                [act[:2] for act in row[: first + 1]],
                [act[:2] for act in row[last:]],
                first < last,
            )
        )
    return found
