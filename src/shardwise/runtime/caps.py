"""Logits that stay below a cap."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118). The logits are used up."""
    found: Tensor = _SoftCap.apply(logits, cap)
    return found


class _SoftCap(Function):
    """Keeps the slope of each logit, 1 - tanh^2, in the logits' own memory."""

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
