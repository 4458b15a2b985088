"""The loss of a microbatch as its share of the loss of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional


def batch_share_loss(tokens: int, vocab: int, mesh: DeviceMesh | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy summed over a microbatch's tokens and divided by `tokens`, those of the whole batch.

    Such shares add up over microbatches and ranks to the mean loss, however unequally the batch is divided.
    With `mesh` the logits are divided along the vocabulary over its ranks, and are never gathered.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float()
        if mesh is not None:
            shape = Size((*logits.shape[:2], vocab))
            stride = (shape[1] * vocab, vocab, 1)
            logits = DTensor.from_local(logits, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        whole = total.full_tensor() if isinstance(total, DTensor) else total
        return whole / tokens

    return loss


def loss_context(mesh: DeviceMesh | None) -> contextlib.AbstractContextManager[None]:
    """Where the forward and backward passes must run, so that the loss works on divided logits."""
    return contextlib.nullcontext() if mesh is None else loss_parallel()
