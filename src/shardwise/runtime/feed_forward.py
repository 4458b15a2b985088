"""The MLP that every token takes, and activation functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwise.model import Mlp
from shardwise.runtime.numerics import Activation, Gate


def activated(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated(gate: Tensor, up: Tensor, how: Gate) -> Tensor:
    """What `how` makes of the two halves, which keeps these alone for the backward pass and makes the product
    again there."""
    product: Tensor = _Gated.apply(gate, up, how)
    return product


def _halves(gate: Tensor, up: Tensor, how: Gate) -> tuple[Tensor, Tensor]:
    """The two factors of the product."""
    if how.limit is not None:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    active = activated(gate, how.activation) if how.gain == 1.0 else gate * (gate * how.gain).sigmoid()
    return active, up + how.shift if how.shift else up


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, how: Gate) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(gate, up)
        active, lifted = _halves(gate, up, how)
        return active * lifted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            active, lifted = _halves(gate, up, ctx.how)
        of_halves = (grads[0] * lifted.detach(), grads[0] * active.detach())
        return *torch.autograd.grad((active, lifted), (gate, up), of_halves), None


class FeedForward(nn.Module):
    """The plain or gated MLP that every token takes."""

    def __init__(self, shape: Mlp, hidden: int, how: Gate) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(hidden, shape.ffn, bias=shape.bias) if shape.gated else None
        self.up = nn.Linear(hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is None:
            return self.down(activated(up, self.how.activation))
        return self.down(gated(self.gate(x), up, self.how))
