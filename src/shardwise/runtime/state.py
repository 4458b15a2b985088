"""What a job holds on one rank: parameters and optimizer states by the names of the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.job import TrainingJob

STATES = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""What each optimizer keeps per parameter; `step` is a number, all else is like the parameter."""


def named(job: TrainingJob) -> list[tuple[int, str, Any]]:
    """This rank's parameters, as its optimizer has them, with their stages and names."""
    return [
        (index, name, job.owned(p)) for index, stage in job.stages for name, p in stage.named_parameters()
    ]


def whole_name(job: TrainingJob, index: int, name: str) -> str:
    """The name in the whole model: a copy of the embedding at the other end is the embedding."""
    return "embedding.tokens.weight" if job.is_copy(index, name) else name


def make_states(job: TrainingJob) -> None:
    """Give every parameter that is trained optimizer states, as they are before the first step."""
    trained = (p for _, stage in job.stages for p in stage.parameters() if p.requires_grad)
    for parameter in map(job.owned, trained):
        job.optimizer.state[parameter].update(first_states(job.plan.job.optimizer, parameter))


def first_states(optimizer: str, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer of this name keeps of `parameter`, as it is before the first step."""
    return {
        # A number of steps is where the fused optimizer has it.
        name: torch.zeros((), device=parameter.device) if name == "step" else torch.zeros_like(parameter)
        for name in STATES[optimizer]
    }


def state_of(job: TrainingJob) -> dict[str, Tensor]:
    """Parameters and optimizer states of this rank by the names of the whole model; the tensors themselves,
    so that loading fills them."""
    state: dict[str, Tensor] = {}
    for index, name, parameter in named(job):
        whole = whole_name(job, index, name)
        state[f"model.{whole}"] = parameter.data
        for key, value in job.optimizer.state[parameter].items():
            if value is not None:
                state[f"optimizer.{whole}.{key}"] = value
    return state
