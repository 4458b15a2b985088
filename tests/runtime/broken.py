"""Twins of the runtime with one mechanism taken out; the equality test must refuse each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.runtime.job import Job
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.modules import Stage, rotation_of
from shardwise.runtime.shard import shard_states


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something that should happen."""


def _loss_of_all_microbatches_twice(tokens: int, vocab: int, mesh: Any) -> Any:
    return batch_share_loss(tokens // 2, vocab, mesh)


def _averaging(stage: Stage, mesh: Any, strategy: Any, dtype: str) -> None:
    shard_states(stage, mesh, strategy, dtype)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def _own_rows_of_replica_0(self: Job, batch: torch.Tensor) -> Any:
    rows = self.plan.job.global_batch_size // self.plan.best.strategy.dp
    own = batch[:rows].unflatten(0, (-1, self.plan.best.strategy.micro_batch_size))
    return own[..., :-1].contiguous(), own[..., 1:].contiguous()


def _one_place_off(rope: Any, positions: torch.Tensor) -> Any:
    return rotation_of(rope, positions * 2)


TWINS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no sum over tensor ranks": ("shardwise.runtime.job.settle", nothing),
    "no tie": ("shardwise.runtime.gradients.Tie.add_up", nothing),
    "gradients averaged over data ranks": ("shardwise.runtime.divide.shard_states", _averaging),
    "no clipping": ("shardwise.runtime.job.scale", nothing),
    "loss over half of the batch": (
        "shardwise.runtime.divide.batch_share_loss",
        _loss_of_all_microbatches_twice,
    ),
    "all replicas take the same rows": ("shardwise.runtime.job.Job._own", _own_rows_of_replica_0),
    "positions twice as far": ("shardwise.runtime.modules.rotation_of", _one_place_off),
}
"""What is replaced (a dotted name), and by what."""
