"""The module whose captured graph `benchmarks.emulated` plans for emulated clusters."""

from __future__ import annotations

from torch import Tensor, nn, randint, randn
from torch.nn import functional

WIDTH, LAYERS, CLASSES, BATCH = 1024, 3, 256, 1024


class Perceptron(nn.Module):
    """Layers of one width: the batch, the rows or the columns of each can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return functional.cross_entropy(self.head(x), target)


def perceptron() -> tuple[nn.Module, dict[str, Tensor]]:
    """The module and the arguments of its forward."""
    return Perceptron(), {"x": randn(BATCH, WIDTH), "target": randint(CLASSES, (BATCH,))}
