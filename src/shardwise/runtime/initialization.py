"""Initial values of parameters, determined by the seed and the parameter's name, independent of the
layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

STD = 0.02
"""Standard deviation of initial matrices (GPT-2). Matrices that write to the residual stream have STD /
sqrt(2 * layers) (Radford et al. 2019, section 2.3)."""

_RESIDUAL = ("attention.out.weight", "mlp.down.weight", "experts.down", "shared.down.weight")
"""Endings of names of matrices that write to the residual stream."""


def initialise(module: nn.Module, *, seed: int, layers: int) -> None:
    """Set every parameter of `module` by its name: matrices normal, norms one, biases zero.

    A parameter has the same value in every module where it has the same name and shape. `layers` is the
    number of layers of the whole model.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, seed=seed, layers=layers))


def initial_value(name: str, shape: torch.Size, *, seed: int, layers: int) -> Tensor:
    """Initial value of parameter `name` with this shape, in fp32 on the host."""
    if name.endswith(("bias", "sinks", "correction")):
        return torch.zeros(shape)
    if len(shape) < 2:
        return torch.ones(shape)
    generator = generator_of(name, seed)
    std = STD / math.sqrt(2 * layers) if name.endswith(_RESIDUAL) else STD
    return torch.randn(shape, generator=generator).mul_(std)


def generator_of(name: str, seed: int) -> torch.Generator:
    """A random generator that depends on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
