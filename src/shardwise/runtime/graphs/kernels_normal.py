"""What a rank computes of normalisations and softmax: statistics over the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwise.runtime.graphs.work import Dims, Kernel, ShardedOperator, aligned, wide, without

EPSILON = 1e-5
"""Where the module of a graph does not say another: PyTorch's for layers, batches and groups."""


def _over(work: ShardedOperator, default: Dims) -> Dims:
    return tuple(str(work.op.attributes["over"]).split()) if "over" in work.op.attributes else default


def _epsilon(work: ShardedOperator, value: Tensor) -> float:
    """Where the module says none, the distance of one to the next number of the statistics' dtype."""
    configured = work.settings.get("epsilon", EPSILON)
    return torch.finfo(wide(value).dtype).eps if configured is None else float(configured)


def _weighted(work: ShardedOperator, value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Times the scale, and the shift added."""
    op = work.op
    for at, (tensor, parameter) in enumerate(zip(parameters, op.parameters, strict=True)):
        own = aligned(tensor, parameter.dims, op.output)
        value = value * own if at == 0 else value + own
    return value


def layer_norm(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    over = _over(work, op.parameters[0].dims if op.parameters else op.output[-1:])
    is_plain = op.output[len(op.output) - len(over) :] == over and all(p.dims == over for p in op.parameters)
    if is_plain and not work.axes(over):
        scale, shift = [*parameters, None, None][:2]
        return functional.layer_norm(
            inputs[0], inputs[0].shape[-len(over) :], scale, shift, _epsilon(work, inputs[0])
        )
    return _normed(work, inputs[0], parameters, over)


def batch_norm(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Over the whole batch; kept statistics are not updated."""
    op = work.op
    channels = op.parameters[0].dims if op.parameters else op.output[1:2]
    over = _over(work, without(op.output, channels))
    if not work.axes(over) and channels == op.output[1:2] and set(over) == set(without(op.output, channels)):
        scale, shift = [*parameters, None, None][:2]
        return functional.batch_norm(
            inputs[0], None, None, scale, shift, training=True, eps=_epsilon(work, inputs[0])
        )
    return _normed(work, inputs[0], parameters, over)


def rms_norm(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    over = _over(work, op.parameters[0].dims if op.parameters else op.output[-1:])
    return _normed(work, inputs[0], parameters, over, moments=(2,))


def _normed(
    work: ShardedOperator,
    value: Tensor,
    parameters: Sequence[Tensor],
    over: Dims,
    moments: Sequence[int] = (1, 2),
) -> Tensor:
    """Less its mean, where that is among the `moments` that are taken, over its deviation; times the scale,
    and the shift added."""
    op = work.op
    own = [
        aligned(tensor, parameter.dims, op.output)
        for tensor, parameter in zip(parameters, op.parameters, strict=True)
    ]
    scale, shift = [*own, None, None][:2]
    at = [op.output.index(dim) for dim in over]
    statistics = _Statistics(at, op.elements(over), partial(_total, work, over))
    result: Tensor = _Normed.apply(value, scale, shift, statistics, 1 in moments, _epsilon(work, value))
    return result


def _total(work: ShardedOperator, over: Dims, sums: Tensor) -> Tensor:
    return work.summed(sums, over, gradients="whole")


@dataclass(frozen=True)
class _Statistics:
    """Means over the dims `at`, of which all ranks together have `count` elements; `total` is the sum of what
    they have."""

    at: Sequence[int]
    count: int
    total: Callable[[Tensor], Tensor]

    def means(self, *values: Tensor) -> Sequence[Tensor]:
        """Of each, with one word between ranks."""
        sums = torch.stack([value.sum(self.at, keepdim=True) for value in values])
        return (self.total(sums) / self.count).unbind()


class _Normed(Function):
    """A normalisation that keeps what it read and its statistics, and nothing of that size besides."""

    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        statistics: _Statistics,
        is_centred: bool,
        epsilon: float,
    ) -> Tensor:
        value = wide(read)
        if is_centred:
            mean, square = statistics.means(value, value.square())
        else:
            (square,) = statistics.means(value.square())
            mean = torch.zeros_like(square)
        rate = (square - mean * mean + epsilon).rsqrt()
        ctx.save_for_backward(read, scale, mean, rate)
        ctx.statistics, ctx.is_centred = statistics, is_centred
        ctx.shift = None if shift is None else (shift.shape, shift.dtype)
        result = (value - mean).mul_(rate)
        if scale is not None:
            result *= scale
        if shift is not None:
            result += shift
        return result.to(read.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        read, scale, mean, rate = ctx.saved_tensors
        gradient = wide(gradients[0])
        normed = (wide(read) - mean).mul_(rate)
        of_shift = None if ctx.shift is None else _summed_to(gradient, *ctx.shift)
        of_scale = None if scale is None else _summed_to(gradient * normed, scale.shape, scale.dtype)
        inner = gradient if scale is None else gradient * scale
        if ctx.is_centred:
            level, slope = ctx.statistics.means(inner, inner * normed)
            found = (inner - level).sub_(normed.mul_(slope)).mul_(rate)
        else:
            (slope,) = ctx.statistics.means(inner * normed)
            found = (inner - normed.mul_(slope)).mul_(rate)
        return found.to(read.dtype), of_scale, of_shift, None, None, None


def _summed_to(value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return value.sum_to_size(shape).to(dtype)


def group_norm(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Statistics of every group, of which a rank may have a part of the channels or none."""
    op = work.op
    default = (op.parameters[0].dims if op.parameters else op.output[1:2])[0]
    channel = str(op.attributes.get("channel", default)).split()[0]
    over = _over(work, without(op.output[1:], (channel,)))
    groups, size = int(op.attributes["groups"]), op.dims[channel]
    value, at = wide(inputs[0]), op.output.index(channel)
    spatial_axes = [op.output.index(dim) for dim in over]
    sums = torch.stack(
        (value.sum(spatial_axes, keepdim=True), value.square().sum(spatial_axes, keepdim=True))
    )
    first, stop = work.interval(channel)
    own = torch.arange(first, stop, device=value.device) // (size // groups)
    shape = list(sums.shape)
    shape[at + 1] = groups
    whole = sums.new_zeros(shape).index_add(at + 1, own, sums)
    split_dims = [rule.split for rule in work.rules if rule.collectives and rule.split]
    whole = work.summed(whole, split_dims, gradients="summed") * (groups / op.elements((*over, channel)))
    mean, square = whole.index_select(at + 1, own).unbind()
    normed = (value - mean) * (square - mean * mean + _epsilon(work, value)).rsqrt()
    return _weighted(work, normed.to(inputs[0].dtype), parameters)


def softmax(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    over = _over(work, op.output[-1:])
    at = [op.output.index(dim) for dim in over]
    is_log = op.attributes.get("function") == "log_softmax"
    if len(at) == 1 and not work.axes(over):
        return functional.log_softmax(inputs[0], at[0]) if is_log else functional.softmax(inputs[0], at[0])
    value = wide(inputs[0])
    less = value - work.largest(value.amax(at, keepdim=True), over)
    total = work.summed(less.exp().sum(at, keepdim=True), over, gradients="summed")
    return (less - total.log() if is_log else less.exp() / total).to(inputs[0].dtype)


NORMALIZATIONS: Mapping[str, Kernel] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "softmax": softmax,
}
"""By kind."""
