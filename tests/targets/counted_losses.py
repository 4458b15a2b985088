"""A child process that counts the bytes of a loss: `python -m tests.targets.counted_losses SOFTWARE DTYPE`.

Writes the bytes per logit at the peak of the head's product, the loss and their backward pass, from the
logits on. The head's other tensors are small: its input has 8 elements per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from tests.targets.counting import PeakBytes, allocated_peak, import_compiler

TOKENS, CLASSES, WIDTH = 2048, 8192, 8

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main(software: str, dtype: str) -> None:
    loss = SOFTWARE[software]()
    element: torch.dtype = getattr(torch, dtype)
    if software == "torchtitan compiled":
        _step(loss, element)  # compiles
        peak = allocated_peak(lambda: _step(loss, element))
    else:
        with PeakBytes() as mode:
            _step(loss, element)
        peak = mode.peak
    sys.stdout.write(f"{peak / (TOKENS * CLASSES)}\n")


def _step(loss: Loss, dtype: torch.dtype) -> None:
    weight = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=True)
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, CLASSES, (1, TOKENS))

    def forward() -> torch.Tensor:
        # Logits have no name here, as in a training loop: once the loss is there, only autograd has them.
        return loss(torch.nn.functional.linear(hidden, weight), targets)

    forward().backward()


def _transformers() -> Loss:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return lambda logits, targets: ForCausalLMLoss(logits, targets, CLASSES)


def _torchtitan() -> Loss:
    from torchtitan.components.loss import cross_entropy_loss

    loss: Loss = cross_entropy_loss
    return loss


def _compiled() -> Loss:
    loss: Loss = torch.compile(_torchtitan())
    return loss


def _megatron(*, is_fused: bool = False) -> Loss:
    import_compiler()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    group: Any = parallel_state.get_tensor_model_parallel_group()

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if is_fused:
            found: torch.Tensor = fused_vocab_parallel_cross_entropy(logits, targets, group)
        else:
            found = vocab_parallel_cross_entropy(logits, targets)
        return found.sum()

    return loss


SOFTWARE: dict[str, Callable[[], Loss]] = {
    "transformers": _transformers,
    "torchtitan": _torchtitan,
    "torchtitan compiled": _compiled,
    "megatron-lm": _megatron,
    "megatron-lm fused": lambda: _megatron(is_fused=True),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
