"""State dicts of jobs: parameters and optimizer states by the names of the whole model or graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.runtime.private import TensorChunks
from shardwise.runtime.regions import DIMS, LocalRegion, Region

StateDict = dict[str, Tensor | TensorChunks]
"""State by name: parameters as `model.NAME`, optimizer states as `optimizer.NAME.KIND`. A tensor that ranks
hold in parts is given as chunks of it, or as a DTensor; each step count is a scalar."""

MODEL, STEP = "model", "step"
"""The kind of parameters, and that of step counts."""

STATES = {"adamw": (STEP, "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""Optimizer states per parameter. `step` is a scalar; others have the parameter's shape."""

ParameterValue = Callable[[str, torch.Size], Tensor]
"""Value of a parameter by its name in the whole network and its full shape, in fp32 on the host."""


def state_name(kind: str, name: str) -> str:
    """Name in a state dict of the parameter `name` (kind `MODEL`), or of its optimizer state `kind`."""
    return f"{MODEL}.{name}" if kind == MODEL else f"optimizer.{name}.{kind}"


def first_states(optimizer: str, parameter: Tensor) -> dict[str, Tensor]:
    """States of optimizer `optimizer` for `parameter`, as before the first step."""
    return {
        # The fused optimizer needs the step count on the parameter's device.
        name: torch.zeros((), device=parameter.device) if name == STEP else torch.zeros_like(parameter)
        for name in STATES[optimizer]
    }


def part_of(value: Tensor, region: Region) -> Tensor:
    """The values at `region` of a full tensor."""
    bounds = tuple((0, size) for size in value.shape) + ((0, 1),) * (DIMS - value.dim())
    return LocalRegion(bounds, {"": value}).view("", region)
