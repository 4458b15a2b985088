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
    never gathered. Logits in fp32 are used up: their memory holds first the probabilities, then the gradient.
    """

    def whole(logits: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = _CrossEntropy.apply(logits, targets)
        return total / tokens

    if mesh is None:
        return whole
    first, group = mesh.get_local_rank() * -(-vocab // mesh.size()), mesh.get_group()

    def divided(logits: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = _VocabParallelCrossEntropy.apply(logits.float(), targets - first, group)
        return total / tokens

    return divided


class _CrossEntropy(Function):
    """Sum over tokens of log(sum of exp(logits)) - the target's logit, of logits (rows, tokens, classes) and
    targets (rows, tokens). In the place of the logits where these are in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits, places = logits.detach(), targets[..., None]
        largest = logits.amax(-1, keepdim=True).float()
        ahead = logits.gather(-1, places).float() - largest
        probabilities = _probabilities(logits)
        ctx.dtype, ctx.gradient = logits.dtype, probabilities
        ctx.save_for_backward(places)
        # By way of the most probable class: the target's probability may be too small for fp32.
        return -(ahead + probabilities.amax(-1, keepdim=True).log()).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None
        gradient.scatter_add_(-1, places, gradient.new_full((), -1.0).expand(places.shape))
        if ctx.dtype == gradient.dtype:
            return gradient.mul_(grads[0]), None
        narrow = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, grads[0], out=narrow), None


def _probabilities(logits: Tensor) -> Tensor:
    """The softmax in fp32, in the place of logits that are; else beside them, in one copy."""
    wide = logits.float()
    return torch.softmax(wide, -1, out=wide)


class _VocabParallelCrossEntropy(Function):
    """The same of logits of some of the classes, in fp32; targets count from the first of these. In the place
    of the logits.

    Over the ranks of `group` go the largest logit of each token, and the target's with the sum (Shoeybi et
    al. 2019, section 3).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        logits = logits.detach()  # what autograd sees of it does not change
        classes = logits.shape[-1]
        largest = logits.new_full((*targets.shape, 1), -torch.inf)
        if classes:
            largest = logits.amax(-1, keepdim=True)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        logits.sub_(largest)
        is_here = (targets >= 0) & (targets < classes)
        places = targets.where(is_here, 0)[..., None]
        sums = logits.new_zeros((2, *targets.shape))
        if classes:
            sums[0] = logits.gather(-1, places).squeeze(-1).where(is_here, 0.0)
        torch.sum(logits.exp_(), -1, out=sums[1])
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
