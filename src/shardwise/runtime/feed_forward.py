"""The MLP that every token takes, and activation functions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from shardwise.model import Mlp
from shardwise.runtime.numerics import Activation


def activated(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


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
        return self.down(activated(self.gate(x), self.activation) * up)
