"""Runs the schedule of a plan without a pipeline: forwards and backwards of the microbatches in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.runtime.modules import ModelStage
from shardwise.schedule import Action, ActionKind


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
