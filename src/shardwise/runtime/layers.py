"""Layers of transformers that save little for the backward pass: norms, soft-caps, activations and MLPs.

`RmsNorm` saves only its input; `softcapped` overwrites its logits; `gated` saves the two halves of a gated
MLP and recomputes their product. `FeedForward` is the dense MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwise.model import Mlp
from shardwise.runtime.numerics import Activation, Gate

# Norms


class RmsNorm(nn.Module):
    """RMSNorm over the last dim, computed in fp32: x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich
    2019, arXiv 1910.07467).

    Saves the input and one scale per row. PyTorch's implementation also saves the normed input, except with
    its fused CUDA kernel, which is used where possible and takes a tenth of the time.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        normed: Tensor = _Normed.apply(x, self.weight, self.epsilon)
        return normed


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grads[0].float()
        of_weight = (grad * normed).sum(tuple(range(x.dim() - 1)))
        grad = grad * weight
        of_input = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return of_input.to(x.dtype), of_weight.to(weight.dtype), None


# Soft-caps


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118). Overwrites `logits`."""
    found: Tensor = _SoftCap.apply(logits, cap)
    return found


class _SoftCap(Function):
    """Saves the derivative of each logit, 1 - tanh^2, in the memory of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        slopes = logits.detach().div_(cap).tanh_()
        found = slopes * cap
        ctx.slopes = slopes.square_().neg_().add_(1.0)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes, ctx.slopes = ctx.slopes, None
        return slopes.mul_(grads[0]), None


# MLPs


def activated(x: Tensor, kind: Activation) -> Tensor:
    """Apply the activation function `kind`."""
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated(gate: Tensor, up: Tensor, how: Gate) -> Tensor:
    """Gated activation of the two halves. Saves only the halves and recomputes the product in the backward
    pass."""
    product: Tensor = _Gated.apply(gate, up, how)
    return product


def _halves(gate: Tensor, up: Tensor, how: Gate) -> tuple[Tensor, Tensor]:
    """The two factors of the gated product."""
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
    """Dense MLP, plain or gated."""

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
