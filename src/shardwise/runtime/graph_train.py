"""The training loop of one rank under the plan of an operator graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from shardwise.graph import OpGraph, OpNode
from shardwise.plan import GraphPlan
from shardwise.runtime.devices import await_device
from shardwise.runtime.graphs import check_told, graph_module
from shardwise.runtime.initial import generator_of
from shardwise.runtime.parallelize import parallelize
from shardwise.runtime.trace import StepTrace, traced
from shardwise.runtime.waiting import Stopwatch
from shardwise.sim import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStep:
    """One step as it went: `step` from 1, the loss, seconds on the clock, those of them in which the rank
    waited for others (None where the system does not tell), and samples so far."""

    step: int
    loss: float
    gradient_norm: float
    step_time_s: float
    exposed_s: float | None
    samples: int


BATCHES = 4
"""So many batches are made, and met again and again: their targets are drawn, and can only be remembered."""


def train_graph(
    report: Callable[[GraphStep], None],
    plan: GraphPlan,
    steps: int,
    lr: float,
    seed: int,
    is_traced: bool = False,
) -> tuple[Span, ...]:
    """Train under `plan` for so many steps; call it on every rank of the process group. `report` gets a
    record of every step. Returns what the last step did on this rank, where it `is_traced` (which makes it
    slower); else nothing."""
    check_told(plan.graph)
    job = parallelize(graph_module(plan.graph, seed=seed), plan, lr=lr)
    rank, trace = distributed.get_rank(), StepTrace()
    for step in range(steps):
        batch = synthetic_batch(plan.graph, seed=seed, step=step)
        stopwatch = Stopwatch.begun()
        is_shown = is_traced and step + 1 == steps
        with traced(rank) if is_shown else nullcontext(trace) as trace:
            result = job.step(batch)
        await_device(plan.cluster)
        step_s, exposed_s = stopwatch.read()
        report(
            GraphStep(
                step=step + 1,
                loss=result.loss,
                gradient_norm=result.gradient_norm,
                step_time_s=step_s,
                exposed_s=exposed_s,
                samples=(step + 1) * plan.graph.batch,
            )
        )
    return trace.spans


def synthetic_batch(graph: OpGraph, *, seed: int, step: int) -> dict[str, Tensor]:
    """Every input of `graph`: classes where an operator reads them as such, else normal numbers."""
    classes = classes_of(graph)
    found: dict[str, Tensor] = {}
    for name, shape in graph.inputs.items():
        random = generator_of(f"{name} {step % BATCHES}", seed)
        if name in classes:
            found[name] = torch.randint(classes[name], shape, generator=random)
        else:
            found[name] = torch.randn(shape, generator=random)
    return found


def classes_of(graph: OpGraph) -> Mapping[str, int]:
    """The inputs that are indices, and below which number."""
    found: dict[str, int] = {}
    for block in graph.blocks:
        for op in block.operators:
            for source, count in _indices(op):
                if source in graph.inputs:
                    found[source] = min(count, found.get(source, count))
    return found


def _indices(op: OpNode) -> list[tuple[str, int]]:
    if op.kind == "embedding":
        indices, table = op.inputs[0], op.parameters[0].dims
        (rows,) = (dim for dim in table if dim not in indices.dims and dim not in op.output)
        return [(indices.source, op.dims[rows])]
    if op.kind == "cross_entropy":
        logits, targets = op.inputs
        (classes,) = (dim for dim in logits.dims if dim not in targets.dims)
        return [(targets.source, op.dims[classes])]
    return []
