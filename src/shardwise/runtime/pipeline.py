"""Runs the schedule of a plan with a pipeline: its very table, handed to PyTorch's pipelining runtime.

Runs the schedule of a plan without a pipeline: forwards and backwards of the microbatches in its order.
"""

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


class PipelineRunner:
    """The stages that one pipeline rank holds, and the actions that all ranks run on them."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        *,
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
        rank: int,
    ) -> None:
        """`rank` is the place in the pipeline."""
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)
        self._rank = rank
        rows = [[str(step) for step in row] for row in lower(schedule, unshard=False).ranks]
        self._runtime = pipeline_runtime(stages, microbatches=schedule.microbatches, loss=loss, rows=rows)

    @property
    def executed(self) -> tuple[str, ...]:
        """What a step runs on this rank, in order, communication included."""
        return tuple(executed_actions(self._runtime, self._rank))

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of all microbatches, given as (microbatches, rows, tokens); the sum of their
        losses where the last stage is here, else 0."""
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
    """What a pipeline rank holds of a pipeline `of` so many stages, ready to be run.

    `tokens`, `hidden` and `logits` are tensors like those of one microbatch at the start, between stages and
    at the end, on the meta device.
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
    """Where gradients are reduced once per step, REDUCE_GRAD of the schedule does it; `GradientReducer` begin
    beside the last backward pass, unless weights have a pass of their own."""
    synchronise(stage, strategy, is_last=is_last and strategy.grad_shard > 1)
    if is_last and stage.replicas is not None and strategy.schedule not in SPLIT_NAMES:
        stage.replicas.expect_last_backward()


def _reduce(stage: ModelStage) -> None:
    """What REDUCE_GRAD of the schedule does for copies of weights."""
    if stage.replicas is not None:
        stage.replicas.reduce()


class GradientAccumulation:
    """One rank's row of a schedule with a single stage; gradients add up over the microbatches."""

    def __init__(
        self,
        stage: ModelStage,
        *,
        actions: Sequence[Action],
        loss: Callable[[Tensor, Tensor], Tensor],
        before_backward: Callable[[bool], None],
    ) -> None:
        """`before_backward` hears of every backward pass, and whether it is the last of the step."""
        self._stage = stage
        self._actions = tuple(actions)
        self._loss = loss
        self._before_backward = before_backward
        self._backwards = sum(action.kind is ActionKind.BACKWARD for action in actions)

    @property
    def executed(self) -> tuple[str, ...]:
        """What a step runs, in order."""
        return tuple(map(str, self._actions))

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of all microbatches, given as (microbatches, rows, tokens); the sum of their
        losses."""
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
