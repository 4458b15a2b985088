"""Compares captured modules under graph plans with the same modules on one process in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from tests.runtime import graph_modules
from tests.runtime.graph_equality import LR, MAX_NORM, Run, largest, relative
from tests.runtime.graph_modules import data_of, module_of
from tests.runtime.jobs import whole_gradients
from torch import nn

from shardwise.graph import OpGraph
from shardwise.plans import Plan
from shardwise.runtime import capture
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.graphs.modules import Captured, captured, part_of_parameter
from shardwise.runtime.workers import Report


@cache
def graph_of(name: str) -> OpGraph:
    """The graph of a module of `graph_modules`."""
    return capture(graph_modules.__file__, name)


@cache
def plain(name: str) -> Run:
    """Three steps of the module on one process, from the parameters of seed 1."""
    return plain_run(name, seed=1, steps=3)


def plain_run(name: str, *, seed: int, steps: int) -> Run:
    """Losses, norms, clipped gradients of the first step, and final parameters of the module on one
    process."""
    module = module_of(name, seed)
    groups = [
        {"params": [each for each in module.parameters() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in module.parameters() if each.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        result = module(*data_of(name, step))
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        norms.append(_clipped(module))
        if step == 0:
            gradients = {key: _gradient(each) for key, each in module.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    parameters = {key: each.detach().clone() for key, each in module.named_parameters()}
    return Run(tuple(losses), tuple(norms), gradients, parameters)


def _clipped(module: nn.Module) -> float:
    """Clips the gradient to MAX_NORM, and returns its norm before that."""
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    norm = float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt())
    for each in gradients:
        each.mul_(min(1.0, MAX_NORM / norm))
    return norm


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


_CAPTURED: dict[tuple[str, int], Captured] = {}
"""Modules that this process has captured, by name and seed: many tests share them."""


def _captured(name: str, seed: int, graph: OpGraph) -> Captured:
    """The captured module of a name with the parameters of a seed."""
    if (name, seed) not in _CAPTURED:
        _CAPTURED[name, seed] = captured(module_of(name, seed), data_of(name, 0), graph)
    return _CAPTURED[name, seed]


def captured_differences(
    report: Report, name: str, plans: Sequence[Plan], expected: Run, seed: int
) -> list[float]:
    """On every rank: the difference from `expected` under each plan. All plans have the same number of
    ranks."""
    own = _captured(name, seed, plans[0].graph)
    found = []
    for plan in plans:
        job = GraphTrainingJob(own, plan, device_type="cpu", lr=LR, max_norm=MAX_NORM)
        found.append(captured_difference(job, name, expected))
    return found


def captured_difference(job: GraphTrainingJob, name: str, expected: Run) -> float:
    losses, norms = [], []
    gradient = 0.0
    for step in range(len(expected.losses)):
        result = job.backward(data_of(name, step))
        if step == 0:
            found = whole_gradients(job)
            right = {
                key: part_of_parameter(expected.gradients, key).reshape(each.shape)
                for key, each in found.items()
            }
            gradient = largest(found, right)
        job.update()
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return max(
        relative(*map(_row, (losses, expected.losses))),
        relative(*map(_row, (norms, expected.norms))),
        gradient,
    )


def _row(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
