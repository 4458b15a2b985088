"""Optimizers of training jobs: AdamW and SGD over the parameters of a rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.private import LocalAdamW

BETAS = (0.9, 0.95)
"""Momentum decay rates of AdamW (Brown et al. 2020, appendix B)."""

WEIGHT_DECAY = 0.1
"""Weight decay of AdamW, for matrices only; this and `BETAS` as for GPT-3 (Brown et al. 2020, appendix B)."""


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """The optimizer `adamw` or `sgd` over `parameters`. Only matrices have weight decay."""
    return optimizer_of_parameters(name, ((each, each.dim() > 1) for each in parameters), lr=lr)


def optimizer_of_parameters(
    name: str, parameters: Iterable[tuple[nn.Parameter, bool]], *, lr: float
) -> torch.optim.Optimizer:
    """The optimizer `adamw` or `sgd` over parameters, each with whether it decays. Both work element by
    element, so any sharding of a tensor is allowed."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter, decays in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, decays), []).append(parameter)
    described = [
        {"params": own, "weight_decay": WEIGHT_DECAY if decays else 0.0}
        for (_, decays), own in groups.items()
    ] or [{"params": []}]  # a stage without parameters
    if name == "sgd":
        return torch.optim.SGD(described, lr=lr, momentum=0.9)
    return LocalAdamW(described, lr=lr, betas=BETAS, fused=True)  # fused: no temporaries
