"""Kills ranks at chosen points of a run: a worker that ends itself as `kill -9` would."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from shardwise.plans import Plan
from shardwise.runtime import TrainOptions, checkpoint, train
from shardwise.runtime import checkpoint as manifest
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.graphs.interpreter import Interpreter
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.uniform import UniformTrainingJob
from shardwise.runtime.workers import Report

PASSES = ("forward", "backward", "optimizer")
PHASES = (*PASSES, "writing", "committing", "renaming", "pruning")
"""Points where a rank may die: in the passes, after the optimizer step, or before its checkpoint file is on
disk. Rank 0 may also die before the manifest is written, before it is renamed to its place, and after an old
checkpoint's manifest is removed."""

OF_RANK_0 = ("committing", "renaming", "pruning")


@dataclass(frozen=True)
class Fault:
    """Rank `rank` dies in `phase` of step `step` (from 1), or of the checkpoint after it. The file `mark`
    makes it happen once only."""

    rank: int
    step: int
    phase: str
    mark: str


def train_with(
    report: Report, plan: Plan, options: TrainOptions, *, faults: tuple[Fault, ...]
) -> tuple[Any, ...]:
    """`train` with these faults."""
    with contextlib.ExitStack() as stack:
        now = stack.enter_context(_counted(options.start))
        for fault in faults:
            if fault.rank == torch.distributed.get_rank():
                stack.enter_context(_faulty(fault, now))
        return train(report, plan, options)


@contextlib.contextmanager
def _counted(start: int) -> Iterator[list[int]]:
    """Inside, the list holds the number of the current step."""
    now = [start]

    def counting(backward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def counted(job: Any, batch: Any) -> Any:
            now[0] += 1
            return backward(job, batch)

        return counted

    with contextlib.ExitStack() as stack:
        for kind in (UniformTrainingJob, UnevenTrainingJob, GraphTrainingJob):
            stack.enter_context(patch.object(kind, "backward", counting(kind.backward)))
        yield now


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def _faulty(fault: Fault, now: list[int]) -> Any:
    """Patches the phase in which the fault strikes."""

    def strike() -> None:
        # A checkpoint is written while the next step runs.
        is_now = fault.step == now[0] or (fault.phase not in PASSES and fault.step == now[0] - 1)
        if is_now and not os.path.exists(fault.mark):
            with open(fault.mark, "x"):
                _die()

    def before(original: Any, *arguments: Any, **named: Any) -> Any:
        strike()
        return original(*arguments, **named)

    def in_backward(original: Any, *arguments: Any) -> Any:
        result = original(*arguments)
        result.register_hook(lambda _: strike())
        return result

    passes = ((ModelStage, "forward"), (Interpreter, "run"))
    targets: dict[str, tuple[Sequence[tuple[Any, str]], Any]] = {
        "forward": (passes, before),
        "backward": (passes, in_backward),
        "optimizer": (((torch.optim.Optimizer, "zero_grad"),), before),
        "writing": (((os, "fsync"),), before),
        "committing": (((checkpoint, "commit"),), before),
        "renaming": (((os, "replace"),), before),
        "pruning": (((manifest, "_remove"),), before),
    }
    owners, way = targets[fault.phase]
    stack = contextlib.ExitStack()
    for owner, name in owners:
        mutant = partial(way, getattr(owner, name))
        stack.enter_context(patch.object(owner, name, _method(mutant)))
    return stack


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around `call`, so that a class binds it as a method."""
    return lambda *given, **named: call(*given, **named)
