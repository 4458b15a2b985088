"""Compares a distributed run with the same model on one process, whose training loop is written here in plain
PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from tests.runtime.jobs import uniform
from tests.runtime.mutants import ALIKE, HALF_MUTANTS, MUTANTS
from tests.runtime.mutation import with_mutant
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.model import Model
from shardwise.plans import Plan
from shardwise.runtime import offload, parallelize, reference_module
from shardwise.runtime.attention import CausalAttention
from shardwise.runtime.data import Synthetic
from shardwise.runtime.initialization import initialise
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.weights import weights_in
from shardwise.runtime.workers import Report

LR = 3e-3
MAX_NORM = 0.5
"""Clipping norm; below the norms that tiny models start with, so that every run clips."""

Gradients = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms of some steps, and the gradients of the first step by name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Gradients


@dataclass(frozen=True)
class Difference:
    """Difference of a rank's run from the single process: relative errors of losses and of norms, and the
    largest error of a gradient relative to the largest gradient of its parameter.

    Also what the rank executed: the actions of a step, the layers of each of its stages, how often they
    computed attention in a step, and whether optimizer states and activations had host buffers.
    """

    loss: float
    norm: float
    gradient: float
    executed: tuple[str, ...]
    parameters: int
    layers: tuple[tuple[int, ...], ...] = ()
    passes: int = 0
    buffers: tuple[bool, bool] = (False, False)

    @property
    def largest(self) -> float:
        return max(self.loss, self.norm, self.gradient)


def whole_module(model: Model, seed: int) -> ModelStage:
    """The reference module, with biases and norms away from 0 and 1 so that errors in them show."""
    module = reference_module(model)
    initialise(module, seed=seed, layers=model.layers)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(seed * 1000 + index)
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            else:
                parameter.mul_(5.0)  # far from uniform attention and uniform logits
    return module


def batches(plan: Plan, seed: int) -> Synthetic:
    job = plan.job
    return Synthetic(
        vocab=plan.model.vocab, global_batch_size=job.global_batch_size, seq_len=job.seq_len, seed=seed
    )


def single_process(plan: Plan, *, seed: int, steps: int) -> Trajectory:
    """The run on one process: mean loss over the global batch, its gradient, clipping, one optimizer step."""
    module = whole_module(plan.model, seed)
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if plan.job.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    losses, norms = [], []
    gradients: dict[str, NDArray[np.float32]] = {}
    for step in range(steps):
        batch = batches(plan, seed).batch(step)
        logits = module(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        if step == 0:
            gradients = {
                name: parameter.grad.numpy().copy()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
        optimizer.step()
        losses.append(loss.item())
    return Trajectory(tuple(losses), tuple(norms), gradients)


def divided(
    report: Report, plan: Plan, expected: Trajectory, seed: int, broken: str | None = None
) -> Difference:
    """On every rank: the difference of the run under `plan` from `expected`. `broken` names a mutant to
    run."""
    with with_mutant({**MUTANTS, **ALIKE}, broken), _counting() as passes, _buffers() as buffers:
        job = uniform(parallelize(whole_module(plan.model, seed), plan, lr=LR, max_norm=MAX_NORM))
        found = difference(job, expected, seed, _gradient_error, job.parameters)
        layers = tuple(tuple(map(int, stage.layers)) for _, stage in job.stages)
        passed = sum(passes) // len(expected.losses)
        has = "OptimizerOffload" in buffers, "ActivationOffload" in buffers
        return replace(found, layers=layers, passes=passed, buffers=has)


def precision(report: Report, plan: Plan, broken: str | None) -> tuple[bool, bool]:
    """On every rank: whether its weights, and whether its summed gradients, have more digits than bf16.
    Nothing is clipped, since that would scale rounded values."""
    with with_mutant(HALF_MUTANTS, broken):
        job = uniform(parallelize(whole_module(plan.model, 0), plan, max_norm=1e9))
    is_more = []
    job.backward(batches(plan, 0).batch(0))
    for values in ([job.owned(p).detach() for p in job.parameters], [p.grad for p in job.parameters]):
        local = [each.to_local() if isinstance(each, DTensor) else each for each in values]
        is_more.append(any(bool((each != each.bfloat16().float()).any()) for each in local))
    weights, gradients = is_more
    return weights, gradients


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Inside, the list gets a 1 each time that a layer computes attention."""
    passes: list[int] = []
    plain = CausalAttention.core

    def counted(self: CausalAttention, *states: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return plain(self, *states)

    with patch.object(CausalAttention, "core", counted):
        yield passes


@contextmanager
def _buffers() -> Iterator[set[str]]:
    """Inside, the set gets the classes that allocate host buffers."""
    allocating: set[str] = set()
    allocate = offload.host_buffer_like

    def recorded(*arguments: Any) -> torch.Tensor:
        allocating.update(frame.f_code.co_qualname.split(".")[0] for frame in _callers())
        return allocate(*arguments)

    with patch.object(offload, "host_buffer_like", recorded):
        yield allocating


def _callers() -> Iterator[FrameType]:
    """The frames of all functions on the call stack."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def difference(
    job: Any,
    expected: Trajectory,
    seed: int,
    gradient_error: Callable[[Any, Gradients], float],
    owned: Sequence[Any],
) -> Difference:
    """Runs `job` for the steps of `expected`. `owned` are the parameters that this rank's optimizer
    updates."""
    data = batches(job.plan, seed)
    losses, norms, gradient = [], [], 0.0
    for step in range(len(expected.losses)):
        result = job.backward(data.batch(step))
        if step == 0:
            gradient = gradient_error(job, expected.gradients)
        job.update()
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return Difference(
        loss=relative(losses, expected.losses),
        norm=relative(norms, expected.norms),
        gradient=gradient,
        executed=job.executed,
        parameters=sum(parameter.numel() for parameter in owned),
    )


def relative(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.nan_to_num(np.abs(found - expected) / np.abs(expected), nan=np.inf).max())


def _gradient_error(job: Any, expected: Gradients) -> float:
    """The largest error of this rank's gradients, gathered; a tied copy is compared with the embedding's."""
    # A gradient that is zero in exact arithmetic (a key's bias shifts all scores equally) has no scale of its
    # own.
    floor = 1e-3 * max(float(np.abs(gradient).max()) for gradient in expected.values())
    worst = 0.0
    for _, stage in job.stages:
        for name, parameter in stage.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = parameter.grad
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            right = expected.get(name, expected["embedding.tokens.weight"])
            if whole is None or whole.shape != right.shape:
                return float("inf")
            error = np.abs(whole.float().numpy() - right).max() / max(float(np.abs(right).max()), floor)
            worst = max(worst, float(np.nan_to_num(error, nan=np.inf)))
    return worst


def load_weights(module: nn.Module, model: Model, folder: str) -> None:
    """Load the safetensors in `folder` into the whole reference `module`."""
    whole = weights_in(folder, model)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(whole(name, parameter.shape))
