"""Runs a plan's schedule: `PipelineRunner` on PyTorch's pipelining runtime, with the plan's own action table;
`GradientAccumulation` without pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from shardwise.runtime.fsdp import synchronise
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.private import SynchronisedStage, executed_actions, pipeline_runtime
from shardwise.schedule import SPLIT_NAMES, Action, ActionKind, Schedule, lower
from shardwise.strategy import Strategy

# With pipeline parallelism


class PipelineRunner:
    """Runs the actions of a schedule on the stages of one pipeline rank."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        *,
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
        rank: int,
    ) -> None:
        """`rank` is the rank in the pipeline."""
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)
        self._rank = rank
        rows = [[str(step) for step in row] for row in lower(schedule, unshard=False).ranks]
        self._runtime = pipeline_runtime(stages, microbatches=schedule.microbatches, loss=loss, rows=rows)

    @property
    def executed(self) -> tuple[str, ...]:
        """Actions that a step runs on this rank, in order, including communication."""
        return tuple(executed_actions(self._runtime, self._rank))

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward passes of all micro-batches, (microbatches, rows, tokens). Returns the sum
        of their losses if the last stage is here, else 0."""
        losses: list[Tensor] = []
        arguments = (tokens.flatten(0, 1),) if self._has_first else ()
        self._runtime.step(
            *arguments,
            target=targets.flatten(0, 1) if self._has_last else None,
            losses=losses if self._has_last else None,
            return_outputs=False,
        )
        return (
            torch.stack([loss.detach() for loss in losses]).sum()
            if losses
            else torch.zeros((), device=tokens.device)
        )


def synchronised_stages(
    stages: Sequence[tuple[int, ModelStage]],
    *,
    of: int,
    strategy: Strategy,
    group: ProcessGroup,
    tokens: Tensor,
    hidden: Tensor,
    logits: Tensor,
) -> list[SynchronisedStage]:
    """The stages that a pipeline rank holds, of `of` stages in total, for PyTorch's pipelining runtime.

    `tokens`, `hidden` and `logits` are meta tensors of one micro-batch: the input of the first stage, what
    stages send, and the output of the last stage.
    """
    device = next(stages[0][1].parameters()).device
    return [
        SynchronisedStage(
            stage,
            index,
            of,
            device,
            group=group,
            before_backward=partial(_before_backward, stage, strategy),
            reduce=partial(_reduce, stage),
            input_args=tokens if index == 0 else hidden,
            output_args=logits if index == of - 1 else hidden,
        )
        for index, stage in stages
    ]


def _before_backward(stage: ModelStage, strategy: Strategy, is_last: bool) -> None:
    """Prepare data-parallel reductions. Those once per step are left to the schedule's REDUCE_GRAD, but
    `GradientReducer` overlaps with the last backward pass unless weight gradients have their own pass."""
    synchronise(stage, strategy, is_last=is_last and strategy.grad_shard > 1)
    if is_last and stage.replicas is not None and strategy.schedule not in SPLIT_NAMES:
        stage.replicas.expect_last_backward()


def _reduce(stage: ModelStage) -> None:
    """The schedule's REDUCE_GRAD for replicated weights."""
    if stage.replicas is not None:
        stage.replicas.reduce()


# Without pipeline parallelism


class GradientAccumulation:
    """Runs one rank's actions of a single-stage schedule; gradients accumulate over micro-batches."""

    def __init__(
        self,
        stage: ModelStage,
        *,
        actions: Sequence[Action],
        loss: Callable[[Tensor, Tensor], Tensor],
        before_backward: Callable[[bool], None],
    ) -> None:
        """`before_backward` is called before every backward pass, with whether it is the last of the step."""
        self._stage = stage
        self._actions = tuple(actions)
        self._loss = loss
        self._before_backward = before_backward
        self._backwards = sum(action.kind is ActionKind.BACKWARD for action in actions)

    @property
    def executed(self) -> tuple[str, ...]:
        """Actions that a step runs, in order."""
        return tuple(map(str, self._actions))

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward passes of all micro-batches, (microbatches, rows, tokens). Returns the sum
        of their losses."""
        losses: dict[int, Tensor] = {}
        total = torch.zeros((), device=tokens.device)
        left = self._backwards
        for action in self._actions:
            microbatch = action.microbatch
            with torch.profiler.record_function(f"PP:{action}"):
                if action.kind is ActionKind.FORWARD:
                    losses[microbatch] = self._loss(self._stage(tokens[microbatch]), targets[microbatch])
                else:
                    left -= 1
                    self._before_backward(left == 0)
                    loss = losses.pop(microbatch)
                    loss.backward()
                    total += loss.detach()
        return total
