"""What a rank computes of losses: its part of the mean over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.runtime.graphs.work import Dims, Kernel, Work, aligned, arranged, wide, without


def cross_entropy(work: Work, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    logits, targets = op.inputs
    (classes,) = without(logits.dims, targets.dims)
    rows = arranged(inputs[0], logits.dims, (*targets.dims, classes))
    rows = wide(rows)
    if work.axes((classes,)):
        each = _of_parts(work, rows, inputs[1].long(), classes)
    else:
        flat = functional.cross_entropy(rows.flatten(0, -2), inputs[1].long().flatten(), reduction="none")
        each = flat.view(inputs[1].shape)
    return _mean(work, each, targets.dims)


def _of_parts(work: Work, rows: Tensor, targets: Tensor, classes: str) -> Tensor:
    """A row's loss where ranks have parts of the classes: they agree on maximum, sum and target's logit."""
    first, stop = work.interval(classes)
    less = rows - work.largest(rows.amax(-1), (classes,)).unsqueeze(-1)
    total = work.summed(less.exp().sum(-1), (classes,), gradients="whole")
    outside = (targets < first) | (targets >= stop)
    own = less.gather(-1, (targets - first).masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
    chosen = work.summed(own.masked_fill(outside, 0.0), (classes,), gradients="whole")
    return total.log() - chosen


def _mean(work: Work, each: Tensor, dims: Dims) -> Tensor:
    """The sum over the dims that the output has not, as this rank's part of a mean."""
    op = work.op
    gone = without(dims, op.output)
    if not gone:
        return arranged(each, dims, op.output)
    result = each.sum([dims.index(dim) for dim in gone]) / op.elements(gone)
    return arranged(result, [dim for dim in dims if dim in op.output], op.output)


def _difference(function: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    def kernel(work: Work, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        prediction, target = work.op.inputs
        other = aligned(inputs[1], target.dims, prediction.dims)
        return _mean(work, function(wide(inputs[0]), wide(other)), prediction.dims)

    return kernel


def _entropy_of_two(prediction: Tensor, target: Tensor) -> Tensor:
    return functional.softplus(prediction) - prediction * target


LOSSES: Mapping[str, Kernel] = {
    "cross_entropy": cross_entropy,
    "mean_square": _difference(lambda x, y: torch.square(x - y)),
    "binary_cross_entropy": _difference(_entropy_of_two),
}
"""By kind."""
