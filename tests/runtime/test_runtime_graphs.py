"""Graph plans on PyTorch: under every layout, losses, gradients and parameters equal those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from tests.property.layout_instances import mlp, skips
from tests.runtime.graph_equality import Run, differences, single_process
from tests.runtime.graph_mutants import GRAPH_MUTANTS, SKIP_TENSOR_MUTANTS
from tests.runtime.graph_plans import alone, by_rules, plan_with, sampled

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.graph import OpNode
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, check_runnable

TOLERANCE = 2e-5
"""Relative, in fp32: sums have another order."""

STEPS = 3

MLP = mlp(8, 6, 12, 5)
UNEVEN = mlp(9, 7, 11, 5)


def data(op: OpNode) -> Sequence[str]:
    return ("split b",)


def columns_then_rows(op: OpNode) -> Sequence[str]:
    return ("split f",) if op.name in ("up", "relu", "down") else ()


def classes(op: OpNode) -> Sequence[str]:
    return ("split v",) if op.name in ("down", "loss") else ()


@cache
def expected(graph: str, optimizer: str = "adamw") -> Run:
    return single_process(alone(GRAPHS[graph], optimizer=optimizer), seed=1, steps=STEPS)  # type: ignore[arg-type]


GRAPHS = {"mlp": MLP, "uneven": UNEVEN, "skips": skips(8, 6, 12, 5)}

BY_HAND = {
    "data on 2": ((2,), (data,)),
    "data on 4": ((4,), (data,)),
    "columns then rows on 2": ((2,), (columns_then_rows,)),
    "columns then rows on 4": ((4,), (columns_then_rows,)),
    "classes on 4": ((4,), (classes,)),
    "data by columns": ((2, 2), (data, columns_then_rows)),
    "columns by classes": ((2, 2), (columns_then_rows, classes)),
}


def differ(team: WorkerPool, plans: Sequence[Plan], graph: str, broken: str | None = None) -> list[float]:
    """The largest difference of any rank, for each plan; all have the same number of devices."""
    run = expected(graph, plans[0].job.optimizer)
    cases = [(plan, run, 1, broken) for plan in plans]
    ranks = team.run(plans[0].mesh.devices, differences, cases)
    return [max(of) for of in zip(*ranks, strict=True)]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", BY_HAND)
def test_layouts_by_hand_train_as_one_process_does(team: WorkerPool, name: str, graph: str) -> None:
    ranks, required = BY_HAND[name]
    plan = plan_with(GRAPHS[graph], ranks, by_rules(GRAPHS[graph], ranks, *required))
    check_runnable(plan)
    assert max(differ(team, [plan], graph)) < TOLERANCE


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("ranks", [(2,), (4,), (2, 2), (2, 2, 2)])
def test_any_layout_trains_as_one_process_does(
    team: WorkerPool, ranks: tuple[int, ...], graph: str, full: bool
) -> None:
    """Any rule of each operator, any placement of each tensor, any storage and use of each parameter."""
    plans = list(sampled(GRAPHS[graph], ranks, range(12 if full else 4)))
    assert max(differ(team, plans, graph)) < TOLERANCE


def test_sgd_trains_as_one_process_does(team: WorkerPool) -> None:
    plan = plan_with(MLP, (4,), by_rules(MLP, (4,), data), optimizer="sgd")
    assert max(differ(team, [plan], "mlp")) < TOLERANCE


@pytest.mark.parametrize("mutant", GRAPH_MUTANTS)
def test_a_broken_mechanism_is_caught(team: WorkerPool, mutant: str) -> None:
    found = differ(team, list(sampled(MLP, (2, 2), range(5))), "mlp", broken=mutant)
    assert max(found) > 100 * TOLERANCE


@pytest.mark.parametrize("mutant", SKIP_TENSOR_MUTANTS)
def test_a_broken_skip_tensor_is_caught(team: WorkerPool, mutant: str) -> None:
    found = differ(team, list(sampled(GRAPHS["skips"], (2,), range(3))), "skips", broken=mutant)
    assert max(found) > 100 * TOLERANCE


def test_plans_that_the_runtime_does_not_run_are_refused_by_name() -> None:
    plan = plan_with(MLP, (2,), by_rules(MLP, (2,), data))
    for bad, key in (
        (replace(plan, job=replace(plan.job, dtype="fp8")), "job.dtype"),
        (replace(plan, cluster=load_cluster("1x2xTPU-v5p")), "cluster"),
        (replace(plan, job=replace(plan.job, optimizer="muon")), "job.optimizer"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_runnable(bad)
        assert caught.value.key == key
