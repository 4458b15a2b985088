"""What a rank computes of losses: its part of the mean over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwise.runtime.graphs.work import Dims, Kernel, ShardedOperator, aligned, arranged, wide, without

IGNORED = -100
"""A target without a loss, in PyTorch's cross entropies."""


def cross_entropy(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    logits, targets = op.inputs
    (classes,) = without(logits.dims, targets.dims)
    rows = arranged(inputs[0], logits.dims, (*targets.dims, classes))
    targets_here = inputs[1].long()
    is_ignored = targets_here == IGNORED
    chosen = targets_here.masked_fill(is_ignored, 0)
    if work.axes((classes,)):
        each = _VocabParallelLogLikelihood.apply(rows, chosen, work, classes)
    else:
        each = _TargetLogLikelihood.apply(rows, chosen)
    each = each.masked_fill(is_ignored, 0.0)
    return _mean(work, each, targets.dims)


class _TargetLogLikelihood(Function):
    """What each row's target has not of the probability, as a logarithm. The gradient takes the place of the
    logarithms that are kept for it: rows are by far the largest tensors of many models."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor) -> Tensor:
        logarithms = functional.log_softmax(rows, -1, dtype=_wide_dtype(rows))
        at = targets.unsqueeze(-1)
        ctx.dtype = rows.dtype
        ctx.save_for_backward(logarithms, at)
        return -logarithms.gather(-1, at).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logarithms, at = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        with torch.no_grad():
            found = logarithms.exp_().mul_(gradient).scatter_add_(-1, at, -gradient)
        return found.to(ctx.dtype), None


class _VocabParallelLogLikelihood(Function):
    """The same where ranks have parts of the classes: they agree on maximum, sum and target's logit. What is
    kept are the summands, of which the gradient's products are made in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, work: ShardedOperator, classes: str) -> Tensor:
        first, stop = work.interval(classes)
        most = work.largest(rows.amax(-1).to(_wide_dtype(rows)), (classes,))
        less = rows - most.unsqueeze(-1)
        outside = ((targets < first) | (targets >= stop)).unsqueeze(-1)
        at = (targets.unsqueeze(-1) - first).masked_fill(outside, 0)
        own = less.gather(-1, at).masked_fill(outside, 0.0).squeeze(-1)
        chosen = work.summed(own, (classes,), gradients="whole")
        summands = less.exp_()
        total = work.summed(summands.sum(-1), (classes,), gradients="whole")
        ctx.dtype = rows.dtype
        ctx.save_for_backward(summands, total, at, outside)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summands, total, at, outside = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        with torch.no_grad():
            own = gradient.masked_fill(outside, 0.0)
            found = summands.mul_(gradient / total.unsqueeze(-1)).scatter_add_(-1, at, -own)
        return found.to(ctx.dtype), None, None, None


def _wide_dtype(rows: Tensor) -> torch.dtype:
    """Sums of many numbers need fp32 at least."""
    return rows.dtype if rows.dtype.itemsize >= 4 else torch.float32


def _mean(work: ShardedOperator, each: Tensor, dims: Dims) -> Tensor:
    """The sum over the dims that the output has not, as this rank's part of a mean."""
    op = work.op
    reduced_dims = without(dims, op.output)
    if not reduced_dims:
        return arranged(each, dims, op.output)
    result = each.sum([dims.index(dim) for dim in reduced_dims]) / op.elements(reduced_dims)
    return arranged(result, [dim for dim in dims if dim in op.output], op.output)


def _difference(function: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    def kernel(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        prediction, target = work.op.inputs
        other = aligned(inputs[1], target.dims, prediction.dims)
        return _mean(work, function(wide(inputs[0]), wide(other)), prediction.dims)

    return kernel


def _bce_with_logits(prediction: Tensor, target: Tensor) -> Tensor:
    return functional.softplus(prediction) - prediction * target


LOSSES: Mapping[str, Kernel] = {
    "cross_entropy": cross_entropy,
    "mean_square": _difference(lambda x, y: torch.square(x - y)),
    "binary_cross_entropy": _difference(_bce_with_logits),
}
"""By kind."""
