"""No candidate of a proof node is below the node's lower bounds of time and memory, at any level of the
proof.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.property.cost_samples import (
    CASES,
    Case,
    descended,
    odd_problem,
    problem_of,
    sampled,
    space_of,
)
from tests.property.test_verification_evaluator import figures_for, legal_strategies
from tests.property.verification_nodes import LEVELS, opened, pipelines_of, widened

from shardwise.cost import Problem, bind
from shardwise.search.step_times import step_times_s
from shardwise.strategy import Strategy
from shardwise_verify.estimate import Evaluation, evaluate
from shardwise_verify.lower_bounds import memory_lower_bound, time_lower_bound, work_lower_bound
from shardwise_verify.nodes import PipelineContext, ProofNodes
from shardwise_verify.schedules import empty_family, table_of, warmup_cooldown_of
from shardwise_verify.strategy_rows import rows_of

ROWS, ALL_ROWS = 40, 4_000
FEW_ROWS = 50
HIDING, ALL_HIDING = 6, 300
FAST_ROWS, ROUNDS = 60, 8

ROUNDING = 1e-12

Floats = NDArray[np.float64]


Part = tuple[PipelineContext, ProofNodes, Evaluation]


@lru_cache(maxsize=len(CASES))
def evaluated(case: Case, count: int) -> tuple[Part, ...]:
    """Legal strategies of a case as nodes of one point, with their costs."""
    problem = problem_of(case)
    return tuple(as_nodes(problem, legal_strategies(problem, count, seed=41)))


ALONE = [pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"floors {case}")) for case in CASES]
"""Each case by one worker, which evaluates it once."""


def as_nodes(problem: Problem, strategies: Sequence[Strategy]) -> list[Part]:
    """Strategies of a problem as nodes of one point, with their costs."""
    figures = figures_for(problem)
    found = evaluate(figures, rows_of(list(strategies)))
    return [
        (pipeline, nodes, Evaluation(*(column[places] for column in found)))
        for places, pipeline, nodes in pipelines_of(figures, strategies)
    ]


def overlap_problem(seed: int) -> Problem:
    """An odd problem with much overlap: collectives of experts and of tensors during the same matmuls,
    gradients, parameters, offloaded activations; at little or much slowdown.
    """
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


def worst_ratio_of_overlap(seed: int) -> float:
    """The largest ratio of a lower bound to its value, at any level, over fast strategies."""
    problem, rng, worst = overlap_problem(seed), random.Random(seed), 0.0
    space = space_of(problem)
    table = sampled(problem, FAST_ROWS, seed, space)
    fast = descended(problem, space, table, lambda rows: step_times_s(problem, rows), ROUNDS)
    for pipeline, nodes, found in as_nodes(problem, list(fast)):
        for box_nodes in (nodes, widened(pipeline, nodes, rng), widened(pipeline, nodes, rng)):
            for level in LEVELS:
                each = ratios(pipeline, opened(box_nodes, level), level, found)
                worst = max(worst, *(float(ratio.max()) for ratio in each))
    return worst


def ratios(
    pipeline: PipelineContext, nodes: ProofNodes, level: str, found: Evaluation
) -> tuple[Floats, Floats, Floats]:
    """The lower bounds of seconds, device bytes and host bytes, divided by their values."""
    is_paired, is_sharded = level in ("paired", "sharded"), level == "sharded"
    seconds = time_lower_bound(pipeline, nodes, is_paired=is_paired, is_sharded=is_sharded)
    if level == "open":
        return seconds / found.step_time_s, np.zeros(1), np.zeros(1)
    device, host = memory_lower_bound(pipeline, nodes, nodes.box.layers_high, is_paired=is_paired)
    return (
        seconds / found.step_time_s,
        device / found.device_bytes,
        host / np.maximum(found.host_bytes, 1.0),
    )


@pytest.mark.parametrize("case", ALONE)
def test_lower_bounds_are_never_exceeded(case: Case, full: bool) -> None:
    rng = random.Random(42)
    parts = evaluated(case, ALL_ROWS if full else ROWS)
    for pipeline, nodes, found in parts:
        for box_nodes in (nodes, widened(pipeline, nodes, rng), widened(pipeline, nodes, rng)):
            for level in LEVELS:
                for ratio in ratios(pipeline, opened(box_nodes, level), level, found):
                    assert ratio.max() <= 1 + ROUNDING, level


def worst_work_ratio(parts: Sequence[Part]) -> float:
    """The largest ratio of the time for all of a model's work, shared evenly, to the step time."""
    return max(
        float((work_lower_bound(pipeline)[nodes.grid] / found.step_time_s).max())
        for pipeline, nodes, found in parts
    )


@pytest.mark.slow
@pytest.mark.xdist_group("few floors")
def test_work_shared_evenly_is_a_lower_bound_under_any_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tight enough that a single block counted twice is noticed."""
    parts = [part for case in CASES for part in evaluated(case, FEW_ROWS)]
    assert 0.8 < worst_work_ratio(parts) <= 1 + ROUNDING
    whole_model = PipelineContext.whole_model

    def broken(pipeline: PipelineContext, of_blocks: Floats) -> Floats:
        doubled: Floats = whole_model(pipeline, of_blocks) + of_blocks.max(axis=0)
        return doubled

    monkeypatch.setattr(PipelineContext, "whole_model", broken)
    assert worst_work_ratio(parts) > 1.001


@pytest.mark.xdist_group("few floors")
def test_the_bound_counts_no_tensor_that_may_be_offloaded() -> None:
    """Where offload is open, tensors that could be offloaded do not count: the bound with them would be above
    strategies that offload them.
    """
    worst = 0.0
    for case in CASES[:6]:
        for pipeline, nodes, found in evaluated(case, FEW_ROWS):
            stays = replace(opened(nodes, "recomputed"), offload=np.zeros(len(nodes), dtype=np.int64))
            worst = max(worst, float(ratios(pipeline, stays, "recomputed", found)[1].max()))
    assert worst > 1.1


@pytest.mark.slow
def test_lower_bounds_hold_whatever_overlaps(full: bool) -> None:
    for seed in range(ALL_HIDING if full else HIDING):
        assert worst_ratio_of_overlap(seed) <= 1 + ROUNDING, seed


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("_added_s", lambda seconds, overlap, action_s, buckets: seconds),
        ("_exposed_at_least_s", lambda pipeline, moved_s, computation_s: moved_s),
    ],
)
def test_a_bound_with_too_little_overlap_is_caught(
    part: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants without overlap of reductions, or of offloaded activations."""
    monkeypatch.setattr(f"shardwise_verify.lower_bounds.{part}", broken)
    assert any(worst_ratio_of_overlap(seed) > 1.0001 for seed in range(4))


@pytest.mark.parametrize("case", ALONE)
def test_lower_bounds_of_points_are_tight(case: Case) -> None:
    """Bytes are exact there; times are exact on one rank, and near elsewhere."""
    parts = evaluated(case, ROWS)
    near = []
    for pipeline, nodes, found in parts:
        seconds, device, host = ratios(pipeline, nodes, "sharded", found)
        assert device.min() >= 1 - ROUNDING
        assert host[found.host_bytes > 0].min(initial=1.0) >= 1 - ROUNDING
        if pipeline.pp == 1:
            assert seconds.min() >= 1 - ROUNDING
        near += seconds.tolist()
    assert np.mean(near) > 0.96


@pytest.mark.slow
def test_a_path_that_counts_forwards_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant makes the bound a little too high."""

    def broken(schedule: str, pp: int, vpp: int, microbatches: int) -> object:
        ramps = warmup_cooldown_of(schedule, pp, vpp, microbatches)
        return replace(ramps, warmup_forwards=np.maximum(ramps.warmup_forwards - 1, 0))

    monkeypatch.setattr("shardwise_verify.nodes.warmup_cooldown_of", broken)
    worst = 0.0
    for case in CASES[:6]:
        for pipeline, nodes, found in evaluated.__wrapped__(case, FEW_ROWS):
            worst = max(worst, float(ratios(pipeline, nodes, "sharded", found)[0].max()))
    assert worst > 1.001


def test_warm_up_and_cool_down_of_every_schedule() -> None:
    """A rank's first backward is of the first micro-batch, its last forward of the last; from 4 pp
    micro-batches on, only the steady state grows.
    """
    for schedule, vpps in (
        ("1f1b", (1,)), ("gpipe", (1,)), ("zb_h1", (1,)), ("zb_h2", (1,)), ("zb_v", (2,)),
        ("dualpipe_v", (2,)), ("interleaved_1f1b", (2, 3, 5)),
    ):  # fmt: skip
        for pp in range(2, 8):
            for vpp in vpps:
                for m in (2 * pp, 4 * pp, 5 * pp, 9 * pp):
                    for row in table_of(empty_family(schedule, pp, vpp, m)):
                        backward = next(action for action in row if action[1] in "BI")
                        forward = [action for action in row if action[1] == "F"][-1]
                        assert backward[2] == 0 and forward[2] == m - 1
                if schedule != "gpipe":
                    few, many = (_exact_ramps(schedule, pp, vpp, m) for m in (4 * pp, 9 * pp))
                    assert few == many


def _exact_ramps(schedule: str, pp: int, vpp: int, m: int) -> list[tuple[object, ...]]:
    """Actions of every row before its first backward and after its last forward, without
    micro-batch numbers.
    """
    found: list[tuple[object, ...]] = []
    for row in table_of(empty_family(schedule, pp, vpp, m)):
        first = next(place for place, action in enumerate(row) if action[1] in "BI")
        last = max(place for place, action in enumerate(row) if action[1] == "F")
        found.append(
            (
                [action[:2] for action in row[: first + 1]],
                [action[:2] for action in row[last:]],
                first < last,
            )
        )
    return found
