"""Runs under graph plans that save checkpoints and resume, and mutants of saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from tests.runtime.graph_equality import MAX_NORM, batches
from tests.runtime.graph_plans import alone
from tests.runtime.jobs import of_all_stages, of_graph, whole_of_shares
from tests.runtime.mutation import with_mutant
from torch import Tensor

from shardwise.graph import OpGraph
from shardwise.plans import Plan
from shardwise.runtime import AsyncCheckpoint, graph_module, load, parallelize, resumable
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.state_dict import StateDict
from shardwise.runtime.workers import Report

BEFORE, AFTER = 2, 3
"""Steps before and after the checkpoint."""

LR = 0.02
"""Learning rate; large enough that a few steps show whether Adam's moments were loaded."""


@dataclass(frozen=True)
class CheckpointedRun:
    """Losses of some steps; and for every parameter and optimizer state as saved or loaded, gathered: its
    dtype and a hash of its bits."""

    losses: tuple[float, ...]
    tensors: Mapping[str, tuple[str, str]]


def stepped(job: GraphTrainingJob, graph: OpGraph, first: int, last: int) -> tuple[float, ...]:
    return tuple(job.step(batches(graph, step)).loss for step in range(first, last))


def whole_losses(plan: Plan) -> tuple[float, ...]:
    """Losses of an uninterrupted run on one process."""
    own = alone(plan.graph, optimizer=plan.job.optimizer)
    source = GraphTrainingJob.source_of(graph_module(plan.graph, seed=1), own)
    job = GraphTrainingJob(source, own, device_type="cpu", lr=LR, max_norm=MAX_NORM)
    return stepped(job, plan.graph, 0, BEFORE + AFTER)


def tensors_of(job: GraphTrainingJob) -> dict[str, tuple[str, str]]:
    """Every parameter as updated and each of its states, gathered on every rank; without step counts."""

    def whole(kind: str, param: ShardedParameter) -> Tensor:
        own = param.owned.detach() if kind == "model" else job.optimizer.state[param.owned][kind]
        return whole_of_shares(param, own).clone()

    states = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[job.plan.job.optimizer]
    return {
        f"{kind} of {name}": (str(tensor.dtype), sha256(tensor.contiguous().numpy().tobytes()).hexdigest())
        for kind in ("model", *states)
        for name, tensor in of_all_stages(job, partial(whole, kind)).items()
    }


def saves(
    report: Report, cases: Sequence[tuple[Plan, str]], broken: str | None = None
) -> list[CheckpointedRun]:
    """Runs under each of these plans; each saves a checkpoint to its folder midway and continues."""
    found = []
    for plan, root in cases:
        job = of_graph(parallelize(graph_module(plan.graph, seed=1), plan, lr=LR, max_norm=MAX_NORM))
        losses = stepped(job, plan.graph, 0, BEFORE)
        tensors = tensors_of(job)
        with with_mutant(SAVING_MUTANTS, broken):
            saving = AsyncCheckpoint(job, root, step=BEFORE, data="random")
            losses += stepped(job, plan.graph, BEFORE, BEFORE + AFTER)
            saving.wait()
        found.append(CheckpointedRun(losses, tensors))
    return found


def loads(
    report: Report, cases: Sequence[tuple[Plan, str]], broken: str | None = None
) -> list[CheckpointedRun]:
    """Runs that start from other parameters, then load the checkpoint of each folder."""
    found = []
    for plan, root in cases:
        job = of_graph(parallelize(graph_module(plan.graph, seed=5), plan, lr=LR, max_norm=MAX_NORM))
        with with_mutant(LOADING_MUTANTS, broken):
            load(job, resumable(plan, root)[0])
        tensors = tensors_of(job)
        found.append(CheckpointedRun(stepped(job, plan.graph, BEFORE, BEFORE + AFTER), tensors))
    return found


def narrow(plan: Plan) -> Plan:
    return replace(plan, job=replace(plan.job, dtype="bf16"))


def _without(ending: str) -> Callable[[GraphTrainingJob], StateDict]:
    """Load targets without names of this ending: those are not read."""
    return lambda job: {name: own for name, own in LOAD_TARGETS(job).items() if not name.endswith(ending)}


def _parameters_alone(job: GraphTrainingJob) -> StateDict:
    return {name: own for name, own in LOAD_TARGETS(job).items() if name.startswith("model.")}


def _first_copies(job: GraphTrainingJob) -> StateDict:
    """Load targets without further copies of a parameter: those ranks keep their own values."""
    stale = {f"model.{param.name}" for param in job.store.values() if not param.is_first_copy}
    return {name: own for name, own in LOAD_TARGETS(job).items() if name not in stale}


def _upside_down(param: ShardedParameter, own: Tensor) -> dict[Any, Tensor]:
    return {at: box.flip(tuple(range(box.dim()))) for at, box in CHUNKS(param, own).items()}


def _at_anothers_place(param: ShardedParameter, own: Tensor) -> dict[Any, Tensor]:
    """A rank's chunk is written at the offset of the opposite rank."""
    grid, here = param.grid, param.grid.here
    grid.here = tuple(count - 1 - at for count, at in zip(grid.counts, here, strict=True))
    try:
        return CHUNKS(param, own)
    finally:
        grid.here = here


CHUNKS = ShardedParameter.chunks
LOAD_TARGETS = GraphTrainingJob.load_targets

_LOAD_TARGETS = "shardwise.runtime.graphs.job.GraphTrainingJob.load_targets"

LOADING_MUTANTS: Mapping[str, tuple[str, Any]] = {
    "the optimizer begins anew": (_LOAD_TARGETS, _parameters_alone),
    "numbers of steps are forgotten": (_LOAD_TARGETS, _without(".step")),
    "second moments are forgotten": (_LOAD_TARGETS, _without(".exp_avg_sq")),
    "copies but the first stay as they are": (_LOAD_TARGETS, _first_copies),
    "what is updated is not put where it is computed with": (
        "shardwise.runtime.graphs.job.GraphTrainingJob.sync_weights",
        lambda job: None,
    ),
}
"""Mutants of loading, by name: the dotted name that is patched, and its replacement."""

SAVING_MUTANTS: Mapping[str, tuple[str, Any]] = {
    "boxes are written upside down": (
        "shardwise.runtime.graphs.parameters.ShardedParameter.chunks",
        _upside_down,
    ),
    "a rank writes where another should": (
        "shardwise.runtime.graphs.parameters.ShardedParameter.chunks",
        _at_anothers_place,
    ),
}
"""Mutants of saving."""
