"""The MLP that every token takes, and activation functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwise.model import Mlp
from shardwise.runtime.numerics import Activation


def activated(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """activated(gate) * up, which keeps these two alone for the backward pass and activates again there."""
    product: Tensor = _Gated.apply(gate, up, kind)
    return product


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return activated(gate, kind) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            again = gate.detach().requires_grad_()
            activation = activated(again, ctx.kind)
        (of_gate,) = torch.autograd.grad(activation, again, grads[0] * up)
        return of_gate, grads[0] * activation.detach(), None


class FeedForward(nn.Module):
    """The plain or gated MLP that every token takes."""

    def __init__(self, shape: Mlp, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(hidden, shape.ffn, bias=shape.bias) if shape.gated else None
        self.up = nn.Linear(hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is None:
            return self.down(activated(up, self.activation))
        return self.down(gated(self.gate(x), up, self.activation))
