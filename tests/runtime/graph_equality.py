"""Compares a graph under a layout with the same graph on one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tests.runtime.graph_mutants import GRAPH_MUTANTS, SKIP_TENSOR_MUTANTS
from tests.runtime.graph_plans import alone
from tests.runtime.graph_stages import STAGE_MUTANTS
from tests.runtime.jobs import of_graph, whole_gradients, whole_parameters
from tests.runtime.mutation import with_mutant
from torch import Tensor

from shardwise.graph import Operand, OpGraph, OpNode
from shardwise.plans import Plan
from shardwise.runtime import graph_module, parallelize
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.workers import Report

LR = 3e-3
MAX_NORM = 0.5
"""Clipping norm; below most norms, so that runs clip."""


def batches(graph: OpGraph, step: int) -> dict[str, Tensor]:
    """Random data for every input of `graph`: numbers, or class indices where an operator reads them as
    such."""
    classes = {
        operand.source: op.dims[next(iter({*dims} - {*operand.dims} - {*op.output}))]
        for block in graph.blocks
        for op in block.operators
        for operand, dims in indices(op)
    }
    random = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randint(classes[name], shape, generator=random)
        if name in classes
        else torch.randn(shape, generator=random)
        for name, shape in graph.inputs.items()
    }


def indices(op: OpNode) -> list[tuple[Operand, tuple[str, ...]]]:
    """The operands that an operator reads as class indices, each with the dims that the classes number."""
    if op.kind == "embedding":
        return [(op.inputs[0], op.parameters[0].dims)]
    return [(op.inputs[1], op.inputs[0].dims)] if op.kind == "cross_entropy" else []


@dataclass(frozen=True)
class Run:
    """Losses and norms of some steps, gradients of the first and parameters after the last, by name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def run_of(job: GraphTrainingJob, graph: OpGraph, steps: int) -> Run:
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        result = job.backward(batches(graph, step))
        if step == 0:
            gradients = whole_gradients(job)
        job.update()
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return Run(tuple(losses), tuple(norms), gradients, whole_parameters(job))


def single_process(plan: Plan, *, seed: int, steps: int) -> Run:
    own = alone(plan.graph, optimizer=plan.job.optimizer, dtype=plan.job.dtype)
    source = GraphTrainingJob.source_of(graph_module(plan.graph, seed=seed), own)
    job = GraphTrainingJob(source, own, device_type="cpu", lr=LR, max_norm=MAX_NORM)
    return run_of(job, plan.graph, steps)


def differences(report: Report, cases: list[tuple[Plan, Run, int, str | None]]) -> list[float]:
    """On every rank: the difference of each plan's run from the expected one."""
    return [_difference(*case) for case in cases]


def _difference(plan: Plan, expected: Run, seed: int, broken: str | None) -> float:
    with with_mutant({**GRAPH_MUTANTS, **SKIP_TENSOR_MUTANTS, **STAGE_MUTANTS}, broken):
        module = graph_module(plan.graph, seed=seed)
        job = of_graph(parallelize(module, plan, lr=LR, max_norm=MAX_NORM))
        run = run_of(job, plan.graph, len(expected.losses))
    return max(
        relative(torch.tensor(run.losses), torch.tensor(expected.losses)),
        relative(torch.tensor(run.norms), torch.tensor(expected.norms)),
        largest(run.gradients, expected.gradients),
        largest(run.parameters, expected.parameters) / 10,  # AdamW divides gradients near zero by themselves
    )


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-6)).nan_to_num(nan=torch.inf).max())


def largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    floor = 1e-3 * max(float(each.abs().max()) for each in expected.values())
    return max(
        float((found[name] - right).abs().max().nan_to_num(nan=torch.inf))
        / max(float(right.abs().max()), floor)
        for name, right in expected.items()
    )
