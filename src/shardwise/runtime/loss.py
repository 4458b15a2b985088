"""The loss of a microbatch as its share of the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def batch_share_loss(tokens: int, vocab: int, mesh: DeviceMesh | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy summed over a microbatch's tokens and divided by `tokens`, those of the whole batch.

    Such shares add up over microbatches and ranks to the mean loss, however unequally the batch is divided.
    With `mesh` the logits are divided along the vocabulary over its ranks (as `Tensor.chunk` does), and are
    never gathered. The logits are used up: their memory holds first the probabilities, then the gradient.
    """
    first, group = 0, None
    if mesh is not None:
        first, group = mesh.get_local_rank() * -(-vocab // mesh.size()), mesh.get_group()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = _CrossEntropy.apply(logits.float(), targets - first, group)
        return total / tokens

    return loss


class _CrossEntropy(Function):
    """Sum over tokens of log(sum of exp(logits)) - the target's logit, of logits (rows, tokens, classes) and
    targets (rows, tokens), which count from the first class that is here. In the place of the logits.

    Over the ranks of `group` go the largest logit of each token, and the target's with the sum (Shoeybi et
    al. 2019, section 3).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None) -> Tensor:
        logits = logits.detach()  # what autograd sees of it does not change
        classes = logits.shape[-1]
        largest = logits.new_full((*targets.shape, 1), -torch.inf)
        if classes:
            largest = logits.amax(-1, keepdim=True)
        if group is not None:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        logits.sub_(largest)
        is_here = (targets >= 0) & (targets < classes)
        places = targets.where(is_here, 0)[..., None]
        sums = logits.new_zeros((2, *targets.shape))
        if classes:
            sums[0] = logits.gather(-1, places).squeeze(-1).where(is_here, 0.0)
        torch.sum(logits.exp_(), -1, out=sums[1])
        if group is not None:
            distributed.all_reduce(sums, group=group)
        logits.div_(sums[1, ..., None])
        ctx.gradient = logits
        ctx.save_for_backward(places, is_here)
        return (sums[1].log() - sums[0]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, is_here = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, places, -is_here[..., None].to(gradient.dtype))
        return gradient.mul_(grads[0]), None, None
