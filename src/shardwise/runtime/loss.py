"""Cross entropy of a micro-batch as its share of the loss of the global batch, also vocab-parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def batch_share_loss(tokens: int, vocab: int, mesh: DeviceMesh | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Loss function: cross entropy summed over a micro-batch and divided by `tokens`, those of the whole
    batch.

    Shares add up over micro-batches and ranks to the mean loss, however the batch is divided. With `mesh`,
    the logits are sharded along the vocabulary over its ranks (as by `Tensor.chunk`) and are never gathered.
    Logits in fp32 are overwritten: their memory holds the probabilities, then the gradient.
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
    """Cross entropy summed over tokens, of logits (rows, tokens, classes) and targets (rows, tokens).
    Overwrites fp32 logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits, places = logits.detach(), targets[..., None]
        largest = logits.amax(-1, keepdim=True).float()
        ahead = logits.gather(-1, places).float() - largest
        probabilities = _probabilities(logits)
        ctx.dtype, ctx.gradient = logits.dtype, probabilities
        ctx.save_for_backward(places)
        # Computed from the most probable class, since the target's probability may underflow in fp32.
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
    """Softmax in fp32: in place for fp32 logits, else in one fp32 copy."""
    wide = logits.float()
    return torch.softmax(wide, -1, out=wide)


class _VocabParallelCrossEntropy(Function):
    """Cross entropy of logits sharded along the vocabulary, in fp32. Overwrites the logits.

    Targets are relative to the first class of this rank. Ranks of `group` all-reduce the largest logit of
    each token, then the target's logit and the sum of exponentials (Megatron-LM, Shoeybi et al. 2019, section
    3).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        logits = logits.detach()  # autograd must not see the in-place changes
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
