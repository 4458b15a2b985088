"""The optimizer of a job over the parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""AdamW as GPT-3 was trained with it (Brown et al. 2020, appendix B); decay on matrices only."""


def optimizer_of(name: str, stages: Iterable[nn.Module], *, lr: float) -> torch.optim.Optimizer:
    """`adamw` or `sgd` (which work element by element, so that any division of a tensor will do)."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for stage in stages:
        for parameter in stage.parameters():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((mesh, parameter.dim() > 1), []).append(parameter)
    described = [
        {"params": parameters, "weight_decay": WEIGHT_DECAY if is_matrix else 0.0}
        for (_, is_matrix), parameters in groups.items()
    ]
    if name == "sgd":
        return torch.optim.SGD(described, lr=lr, momentum=0.9)
    return torch.optim.AdamW(described, lr=lr, betas=BETAS)
