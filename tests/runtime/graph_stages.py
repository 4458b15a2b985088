"""Mutants of the runtime of staged graph plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.graphs.interpreter import GraphStage, _Passes
from shardwise.runtime.graphs.job import GraphTrainingJob
from shardwise.runtime.graphs.parameters import ShardedParameter, square_sum
from shardwise.runtime.graphs.redistribute import TensorSpec


def _last_gradient(param: ShardedParameter, gradient: Tensor, used: TensorSpec) -> None:
    param.reset_gradient()
    RECEIVE(param, gradient, used)


def _other_order(stage: GraphStage, row: Any, data: Sequence[Any]) -> Tensor:
    return RUN(stage, row, data[::-1] if stage.is_last else data)


def _no_answer(passes: _Passes, number: int, result: Tensor) -> Tensor:
    gradient = GRADIENT(passes, number, result)
    return gradient if passes.stage.is_last else torch.zeros_like(gradient)


def _first_samples(job: GraphTrainingJob, name: str, tensor: Tensor) -> Sequence[Tensor]:
    parts = SHARED_OUT(job, name, tensor)
    return [parts[0]] * len(parts)


def _of_first_stage(parameters: Iterable[ShardedParameter], device_type: str) -> Tensor:
    return square_sum([param for param in parameters if param.grid.mesh == 0], device_type)


RECEIVE, RUN, GRADIENT, SHARED_OUT = (
    ShardedParameter.receive,
    GraphStage.run,
    _Passes._gradient,
    GraphTrainingJob._split_microbatches,
)

STAGE_MUTANTS: Mapping[str, tuple[str, Any]] = {
    "losses of micro-batches count in full": (
        "shardwise.runtime.graphs.job.loss_weight",
        lambda graph, microbatches: 1.0,
    ),
    "gathered parameters have the gradient of the last micro-batch": (
        "shardwise.runtime.graphs.parameters.ShardedParameter.receive",
        _last_gradient,
    ),
    "stages take micro-batches in different orders": (
        "shardwise.runtime.graphs.interpreter.GraphStage.run",
        _other_order,
    ),
    "gradients end at the last cut": ("shardwise.runtime.graphs.interpreter._Passes._gradient", _no_answer),
    "every micro-batch is the first": (
        "shardwise.runtime.graphs.job.GraphTrainingJob._split_microbatches",
        _first_samples,
    ),
    "the norm is that of the first stage": (
        "shardwise.runtime.graphs.job.square_sum",
        _of_first_stage,
    ),
}
"""Mutants by name: the dotted name that is patched, and its replacement."""
