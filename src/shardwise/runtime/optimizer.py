"""The optimizer of a job over the parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.private import LocalAdamW

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""AdamW as GPT-3 was trained with it (Brown et al. 2020, appendix B); decay on matrices only."""


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """`adamw` or `sgd` over `parameters`; weights decay where they are matrices."""
    return optimizer_of_parameters(name, ((each, each.dim() > 1) for each in parameters), lr=lr)


def optimizer_of_parameters(
    name: str, parameters: Iterable[tuple[nn.Parameter, bool]], *, lr: float
) -> torch.optim.Optimizer:
    """`adamw` or `sgd` (which work element by element, so that any division of a tensor will do) over
    parameters of which each says whether it decays."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter, decays in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, decays), []).append(parameter)
    described = [
        {"params": own, "weight_decay": WEIGHT_DECAY if decays else 0.0}
        for (_, decays), own in groups.items()
    ] or [{"params": []}]  # of a stage that has none
    if name == "sgd":
        return torch.optim.SGD(described, lr=lr, momentum=0.9)
    return LocalAdamW(described, lr=lr, betas=BETAS, fused=True)  # no temporaries beside the states
