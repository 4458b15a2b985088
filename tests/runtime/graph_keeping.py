"""Runs under graph plans that are saved on the way and go on, and broken twins of what saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from tests.runtime.graph_equality import MAX_NORM, batches
from tests.runtime.graph_plans import alone
from tests.runtime.twin import broken_twin
from torch import Tensor

from shardwise.graph import OpGraph
from shardwise.plan import GraphPlan
from shardwise.runtime import GraphJob, Report, Saving, graph_module, load, parallelize, resumable
from shardwise.runtime.graph_state import Saved, wanted_of
from shardwise.runtime.graphs import laid_job
from shardwise.runtime.graphs.store import Held

BEFORE, AFTER = 2, 3
"""Steps before and behind the checkpoint."""

LR = 0.02
"""With which a few steps show whether moments are there."""


@dataclass(frozen=True)
class Kept:
    """Losses of some steps; and of every parameter and optimizer state, whole, as it was saved or loaded, its
    dtype and a hash of its bits."""

    losses: tuple[float, ...]
    tensors: Mapping[str, tuple[str, str]]


def stepped(job: GraphJob, graph: OpGraph, first: int, last: int) -> tuple[float, ...]:
    return tuple(job.step(batches(graph, step)).loss for step in range(first, last))


def whole_losses(plan: GraphPlan) -> tuple[float, ...]:
    """Losses of a run on one process that nothing happens to."""
    job = laid_job(
        graph_module(plan.graph, seed=1),
        alone(plan.graph, optimizer=plan.job.optimizer),
        None,
        device_type="cpu",
        lr=LR,
        max_norm=MAX_NORM,
    )
    return stepped(job, plan.graph, 0, BEFORE + AFTER)


def tensors_of(job: GraphJob) -> dict[str, tuple[str, str]]:
    """Every parameter as it is updated, and each of its states, as every rank puts them together; without
    numbers of steps."""

    def whole(kind: str, held: Held) -> Tensor:
        own = held.owned.detach() if kind == "model" else job.optimizer.state[held.owned][kind]
        return held._whole(held._joined(own)).clone()

    states = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[job.plan.job.optimizer]
    return {
        f"{kind} of {name}": (str(tensor.dtype), sha256(tensor.contiguous().numpy().tobytes()).hexdigest())
        for kind in ("model", *states)
        for name, tensor in job._of_all_stages(partial(whole, kind)).items()
    }


def saves(report: Report, cases: Sequence[tuple[GraphPlan, str]], broken: str | None = None) -> list[Kept]:
    """Runs under each of these plans that go on while they are saved on the way, each in its folder."""
    found = []
    for plan, root in cases:
        job = parallelize(graph_module(plan.graph, seed=1), plan, lr=LR, max_norm=MAX_NORM)
        losses = stepped(job, plan.graph, 0, BEFORE)
        tensors = tensors_of(job)
        with broken_twin(SAVING_TWINS, broken):
            saving = Saving(job, root, step=BEFORE, data="random")
            losses += stepped(job, plan.graph, BEFORE, BEFORE + AFTER)
            saving.wait()
        found.append(Kept(losses, tensors))
    return found


def loads(report: Report, cases: Sequence[tuple[GraphPlan, str]], broken: str | None = None) -> list[Kept]:
    """Runs that start from other parameters, then from the checkpoint in each folder."""
    found = []
    for plan, root in cases:
        job = parallelize(graph_module(plan.graph, seed=5), plan, lr=LR, max_norm=MAX_NORM)
        with broken_twin(LOADING_TWINS, broken):
            load(job, resumable(plan, root)[0])
        tensors = tensors_of(job)
        found.append(Kept(stepped(job, plan.graph, BEFORE, BEFORE + AFTER), tensors))
    return found


def narrow(plan: GraphPlan) -> GraphPlan:
    return replace(plan, job=replace(plan.job, dtype="bf16"))


def _without(ending: str) -> Callable[[GraphJob], Saved]:
    """Of what names end so nothing is read."""
    return lambda job: {name: own for name, own in wanted_of(job).items() if not name.endswith(ending)}


def _parameters_alone(job: GraphJob) -> Saved:
    return {name: own for name, own in wanted_of(job).items() if name.startswith("model.")}


def _first_copies(job: GraphJob) -> Saved:
    """A rank that has a copy of a parameter that another has keeps its own."""
    stale = {f"model.{held.name}" for held in job.store.values() if not held.is_first_copy}
    return {name: own for name, own in wanted_of(job).items() if name not in stale}


def _upside_down(held: Held, own: Tensor) -> dict[Any, Tensor]:
    return {at: box.flip(tuple(range(box.dim()))) for at, box in PIECES(held, own).items()}


def _at_anothers_place(held: Held, own: Tensor) -> dict[Any, Tensor]:
    """A rank's part lies where that of the rank opposite should."""
    grid, here = held.grid, held.grid.here
    grid.here = tuple(count - 1 - at for count, at in zip(grid.counts, here, strict=True))
    try:
        return PIECES(held, own)
    finally:
        grid.here = here


PIECES = Held.pieces

_WANTED = "shardwise.runtime.graph_state.wanted_of"

LOADING_TWINS: Mapping[str, tuple[str, Any]] = {
    "the optimizer begins anew": (_WANTED, _parameters_alone),
    "numbers of steps are forgotten": (_WANTED, _without(".step")),
    "second moments are forgotten": (_WANTED, _without(".exp_avg_sq")),
    "copies but the first stay as they are": (_WANTED, _first_copies),
    "what is updated is not put where it is computed with": (
        "shardwise.runtime.graphs.graph_job.GraphJob.spread",
        lambda job: None,
    ),
}
"""What is replaced while a checkpoint is loaded, and by what."""

SAVING_TWINS: Mapping[str, tuple[str, Any]] = {
    "boxes are written upside down": ("shardwise.runtime.graphs.store.Held.pieces", _upside_down),
    "a rank writes where another should": (
        "shardwise.runtime.graphs.store.Held.pieces",
        _at_anothers_place,
    ),
}
"""The same while it is saved."""
