"""Broken twins of what runs graphs in stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.graphs.bring import Lie
from shardwise.runtime.graphs.graph_job import GraphJob
from shardwise.runtime.graphs.stage import Stage, _Passes
from shardwise.runtime.graphs.store import Held, square_sum


def _last_gradient(held: Held, gradient: Tensor, used: Lie) -> None:
    held.await_gradient()
    RECEIVE(held, gradient, used)


def _other_order(stage: Stage, row: Any, data: Sequence[Any]) -> Tensor:
    return RUN(stage, row, data[::-1] if stage.is_last else data)


def _no_answer(passes: _Passes, number: int, result: Tensor) -> Tensor:
    gradient = GRADIENT(passes, number, result)
    return gradient if passes.stage.is_last else torch.zeros_like(gradient)


def _first_samples(job: GraphJob, name: str, tensor: Tensor) -> Sequence[Tensor]:
    parts = SHARED_OUT(job, name, tensor)
    return [parts[0]] * len(parts)


def _of_first_stage(parameters: Iterable[Held], device_type: str) -> Tensor:
    return square_sum([held for held in parameters if held.grid.mesh == 0], device_type)


RECEIVE, RUN, GRADIENT, SHARED_OUT = Held.receive, Stage.run, _Passes._gradient, GraphJob._shared_out

STAGE_TWINS: Mapping[str, tuple[str, Any]] = {
    "losses of micro-batches count in full": (
        "shardwise.runtime.graphs.graph_job.loss_weight",
        lambda graph, microbatches: 1.0,
    ),
    "gathered parameters have the gradient of the last micro-batch": (
        "shardwise.runtime.graphs.store.Held.receive",
        _last_gradient,
    ),
    "stages take micro-batches in different orders": (
        "shardwise.runtime.graphs.stage.Stage.run",
        _other_order,
    ),
    "gradients end at the last cut": ("shardwise.runtime.graphs.stage._Passes._gradient", _no_answer),
    "every micro-batch is the first": (
        "shardwise.runtime.graphs.graph_job.GraphJob._shared_out",
        _first_samples,
    ),
    "the norm is that of the first stage": (
        "shardwise.runtime.graphs.graph_job.square_sum",
        _of_first_stage,
    ),
}
"""What is replaced, and by what."""
