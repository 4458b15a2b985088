"""Graph plans in bf16: every layout computes in bf16, with weights and gradients in fp32.

Differences from a run in fp32 come from a few bf16 roundings in a row (2^-9 relative each).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.property.layout_instances import mlp
from tests.runtime.captured_equality import graph_of
from tests.runtime.graph_counted_collectives import predicted
from tests.runtime.graph_equality import Run, batches, run_of, single_process
from tests.runtime.graph_modules import data_of, module_of
from tests.runtime.graph_plans import alone, by_rules, plan_with, sampled
from tests.runtime.jobs import of_graph, whole_gradients, whole_parameters
from tests.runtime.test_runtime_graph_plan_is_followed import MLP as EVEN
from tests.runtime.test_runtime_graph_plan_is_followed import as_predicted, steps_of
from tests.runtime.test_runtime_graphs import BY_HAND
from torch import Tensor

from shardwise.graph import OpGraph
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, graph_module, parallelize
from shardwise.runtime.graphs import GraphTrainingJob, interpreter
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.kernels_elementwise import LOSSES
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.workers import Report

GRAPH = mlp(8, 6, 12, 5)

STEPS = 1
"""Only the first step is compared."""

LOSS, GRADIENT = 0.01, 0.03
"""Tolerances, relative: of the loss, and of the norm of a gradient's error. One rounding is 0.002."""


def narrow(plan: Plan) -> Plan:
    return replace(plan, job=replace(plan.job, dtype="bf16"))


def runs(report: Report, plans: list[Plan], seed: int) -> list[Run]:
    """The run of each plan."""
    return [
        run_of(
            of_graph(parallelize(graph_module(plan.graph, seed=seed), plan, max_norm=0.5)), plan.graph, STEPS
        )
        for plan in plans
    ]


@cache
def expected() -> Run:
    return single_process(alone(GRAPH), seed=1, steps=STEPS)


def loss_off(found: Run, right: Run) -> float:
    """Error of the first loss; later ones depend on weights that AdamW moves by the signs of small
    gradients."""
    return abs(found.losses[0] / right.losses[0] - 1.0)


def gradients_off(found: Run, right: Run) -> float:
    """The largest error of a gradient."""
    floor = 0.1 * max(float(each.norm()) for each in right.gradients.values())
    return max(
        float((found.gradients[name] - each).norm()) / max(float(each.norm()), floor)
        for name, each in right.gradients.items()
    )


def test_layouts_in_bf16_train_as_one_process_does_in_fp32(team: WorkerPool) -> None:
    for ranks in ((2,), (4,), (2, 2)):
        plans = [
            plan_with(GRAPH, ranks, by_rules(GRAPH, ranks, *required), dtype="bf16")
            for on, required in BY_HAND.values()
            if on == ranks
        ]
        plans += map(narrow, sampled(GRAPH, ranks, range(8)))
        for of_rank in team.run(plans[0].mesh.devices, runs, plans, 1):
            for found in of_rank:
                assert loss_off(found, expected()) < LOSS
                assert gradients_off(found, expected()) < GRADIENT
                assert {each.dtype for each in found.gradients.values()} == {torch.float32}


def test_computation_is_in_bf16() -> None:
    job = alone_in_bf16(GRAPH, lr=1e-3)
    seen: set[torch.dtype] = set()
    noted = {kind: noting(kernel, seen) for kind, kernel in KERNELS.items() if kind not in LOSSES}
    with patch.object(interpreter, "KERNELS", {**KERNELS, **noted}):
        job.step(batches(GRAPH, 0))
    assert seen == {torch.bfloat16}


def noting(kernel: Any, seen: set[torch.dtype]) -> Any:
    def noted(work: Any, inputs: Any, parameters: Any) -> Tensor:
        seen.update(each.dtype for each in (*inputs, *parameters))
        result: Tensor = kernel(work, inputs, parameters)
        return result

    return noted


def alone_in_bf16(graph: OpGraph, lr: float) -> GraphTrainingJob:
    plan = alone(graph, dtype="bf16")
    source = GraphTrainingJob.source_of(graph_module(graph, seed=1), plan)
    return GraphTrainingJob(source, plan, device_type="cpu", lr=lr, max_norm=1e9)


@contextmanager
def no_masters() -> Iterator[None]:
    """The mutant whose optimizer updates the bf16 weights themselves."""

    def narrow_only(
        param: ShardedParameter, grid: Any, stored: Any, whole: Tensor, dtype: torch.dtype, sums: Tensor
    ) -> None:
        init(param, grid, stored, whole.to(dtype), dtype, sums.to(dtype))

    init = ShardedParameter.__init__
    with patch.object(ShardedParameter, "__init__", narrow_only):
        yield


def change_after(job: GraphTrainingJob, steps: int) -> float:
    """The median change of a weight."""
    before = {name: each.clone() for name, each in whole_parameters(job).items()}
    for _ in range(steps):
        job.step(batches(GRAPH, 0))
    after = whole_parameters(job)
    weights = [name for name, each in before.items() if float(each.abs().max()) > 0.0]
    return float(torch.cat([(after[name] - before[name]).abs().flatten() for name in weights]).median())


def test_updates_too_small_for_bf16_add_up() -> None:
    """AdamW moves a weight by the learning rate in each of five steps: by 5e-6 with weights of about 0.3,
    where neighbouring bf16 numbers are 2^-9 relative apart, about 6e-4."""
    assert change_after(alone_in_bf16(GRAPH, lr=1e-6), steps=5) == pytest.approx(5e-6, rel=0.1)
    with no_masters():
        assert change_after(alone_in_bf16(GRAPH, lr=1e-6), steps=5) == 0.0


def test_bf16_copies_follow_the_updated_weights() -> None:
    job = alone_in_bf16(GRAPH, lr=1e-2)
    job.step(batches(GRAPH, 0))
    for param in job.store.values():
        assert param.weight.dtype == torch.bfloat16 and param.owned.dtype == torch.float32
        assert torch.equal(param.weight, param.owned.bfloat16())


@pytest.mark.parametrize("ranks", [(2,), (2, 2)])
def test_collectives_in_bf16_are_as_predicted(team: WorkerPool, ranks: tuple[int, ...]) -> None:
    """Activations and weights have 2 bytes each; gradients of weights and sums within the loss have 4."""
    plans = [
        plan_with(EVEN, on, by_rules(EVEN, on, *required), dtype="bf16")
        for on, required in BY_HAND.values()
        if on == ranks
    ]
    for plan, found in zip(plans, team.run(plans[0].mesh.devices, steps_of, plans)[0], strict=True):
        assert as_predicted(found) == predicted(plan), plan.operators


MODULES = ("vgg", "lstm", "transformer", "vision", "rows", "cells")


def modules_run(report: Report, name: str, plans: list[Plan]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of the module's first step under each plan."""
    data = tuple(each.float() if each.is_floating_point() else each for each in data_of(name, 0))
    found = []
    for plan in plans:
        job = of_graph(parallelize(module_of(name, 1).float(), plan, data, max_norm=1e9))
        loss = job.backward(data).loss
        found.append((loss, whole_gradients(job)))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_captured_modules_train_in_bf16(team: WorkerPool, name: str, full: bool) -> None:
    graph = graph_of(name)
    plain = list(sampled(graph, (2,), range(2 if full else 1)))
    ((loss, right), *_), *_ = team.run(2, modules_run, name, plain[:1])
    size = torch.cat([each.flatten() for each in right.values()]).norm()
    for of_rank in team.run(2, modules_run, name, list(map(narrow, plain))):
        for found, gradients in of_rank:
            assert found == pytest.approx(loss, rel=0.03)
            off = torch.cat([(gradients[key] - each).flatten() for key, each in right.items()]).norm()
            assert off < 0.1 * size
