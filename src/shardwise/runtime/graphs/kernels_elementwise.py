"""Kernels of elementwise functions, reductions and reshapes; of norms and softmax; and of losses.

Norms and softmax all-reduce their statistics over the ranks that shard the normalised dims. A loss is this
rank's part of the mean over the whole batch. `kernels.KERNELS` joins them with the other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.graph import OpNode
from shardwise.runtime.graphs.sharded_operator import (
    Dims,
    Kernel,
    ShardedOperator,
    aligned,
    arranged,
    wide,
    without,
)

# Elementwise functions, reductions and reshapes

ELEMENT_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "add": lambda *terms: sum(terms[1:], start=terms[0]),
    "subtract": torch.sub,
    "identity": lambda x: x,
    "negate": torch.neg,
    "multiply": torch.mul,
    "divide": torch.div,
    "silu_multiply": lambda x, y: functional.silu(x) * y,
    "gelu_multiply": lambda x, y: functional.gelu(x) * y,
    "where": lambda c, x, y: torch.where(c > 0, x, y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "log": torch.log,
    "square": torch.square,
    "softplus": functional.softplus,
}
"""Functions that their name alone defines."""

SCALAR_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "scale": lambda number, x: number * x,
    "shift": lambda number, x: x + number,
    "power": lambda number, x: x**number,
    "masked_fill": lambda number, x, mask: x.masked_fill(mask > 0, number),
}
"""Functions that their name and the operator's attribute `number` define."""


def element_function(op: OpNode) -> Callable[..., Tensor]:
    """The function of an elementwise operator as its graph defines it.

    ConfigError where the graph does not define it: it needs the module that the graph was captured from.
    """
    name = str(op.attributes["function"])
    if name in SCALAR_FUNCTIONS and "number" in op.attributes:
        return partial(SCALAR_FUNCTIONS[name], float(op.attributes["number"]))
    if name not in ELEMENT_FUNCTIONS:
        raise ConfigError(
            f"of operator {op.name} does not define what is computed",
            key="attributes.function",
            found=f"{name} without a number" if name in SCALAR_FUNCTIONS else name,
            allowed=f"{', '.join(ELEMENT_FUNCTIONS)}; {', '.join(SCALAR_FUNCTIONS)} with a `number`; "
            "or the module that the graph was captured from",
        )
    return ELEMENT_FUNCTIONS[name]


def elementwise(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    dims = [*(operand.dims for operand in op.inputs), *(own.dims for own in op.parameters)]
    operands = [
        aligned(tensor, own, op.output) for tensor, own in zip((*inputs, *parameters), dims, strict=True)
    ]
    function = work.settings.get("function") or element_function(op)
    return function(*operands).expand([work.length(dim) for dim in op.output])


def reduce(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    dims = op.inputs[0].dims
    over = without(dims, op.output)
    at = [dims.index(dim) for dim in over]
    name = op.attributes["function"]
    if name in ("sum", "mean"):
        result = inputs[0].sum(at)
        result = result / op.elements(over) if name == "mean" else result
    else:
        sign = 1.0 if name == "maximum" else -1.0
        own = (sign * inputs[0]).amax(at)
        top = work.largest(own, over)
        result = sign * torch.where(own == top, own, top) if work.axes(over) else sign * own
    return arranged(result, [dim for dim in dims if dim in op.output], op.output)


def rotary(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Rotary position embedding: rotates the halves of a head's elements by the given angles."""
    op = work.op
    if len(inputs) != 3:
        raise ConfigError(
            f"of operator {op.name} lack the angles", key="inputs", found=str(len(inputs)),
            allowed="an activation, cosines and sines",
        )  # fmt: skip
    value, cosines, sines = (
        aligned(tensor, operand.dims, op.output) for tensor, operand in zip(inputs, op.inputs, strict=True)
    )
    over = op.output.index(str(op.attributes.get("over", op.output[-1])).split()[0])
    first, second = value.chunk(2, dim=over)
    return value * cosines + torch.cat((-second, first), dim=over) * sines


def reshape(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return inputs[0].reshape([work.length(dim) for dim in work.op.output])


def transpose(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    result = arranged(inputs[0], work.op.inputs[0].dims, work.op.output)
    return result.contiguous() if work.op.attributes.get("copies") else result


def concat(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    operands = [*(operand.dims for operand in op.inputs), *(own.dims for own in op.parameters)]
    own = [dim for dim in op.output if any(dim not in operand for operand in operands)]
    joined = str(op.attributes.get("over", (own or op.output)[0]))
    return torch.cat((*inputs, *parameters), dim=op.output.index(joined))


def slice_dims(work: ShardedOperator, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    op = work.op
    before = op.inputs[0].dims
    start = int(op.attributes.get("start", 0))
    dropped_dims, made = without(before, op.output), without(op.output, before)
    result = inputs[0]
    if not made:
        for dim in reversed(dropped_dims):
            result = result.select(before.index(dim), start)
        return arranged(result, without(before, dropped_dims), op.output)
    for old, new in zip(dropped_dims, made, strict=True):
        result = result.narrow(before.index(old), start, op.dims[new])
    renamed = dict(zip(dropped_dims, made, strict=True))
    return arranged(result, [renamed.get(dim, dim) for dim in before], op.output)


POINTWISE: Mapping[str, Kernel] = {
    "elementwise": elementwise,
    "reduce": reduce,
    "rotary": rotary,
    "reshape": reshape,
    "transpose": transpose,
    "concat": concat,
    "slice": slice_dims,
}
"""Kernels of elementwise functions, reductions and reshapes by operator kind."""


# Norms and softmax

EPSILON = 1e-5
"""Epsilon of a norm whose module names none: PyTorch's default for layer, batch and group norms."""


def _over(work: ShardedOperator, default: Dims) -> Dims:
    return tuple(str(work.op.attributes["over"]).split()) if "over" in work.op.attributes else default


def _epsilon(work: ShardedOperator, value: Tensor) -> float:
    """The epsilon of a norm. For eps=None it is the machine epsilon of the dtype of the statistics."""
    configured = work.settings.get("epsilon", EPSILON)
    return torch.finfo(wide(value).dtype).eps if configured is None else float(configured)


def _weighted(work: ShardedOperator, value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`value` times the scale, plus the shift."""
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
    """Statistics over the whole batch. Running statistics are not updated."""
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
    """Normalise `value` over the dims `over`; then times the scale, plus the shift.

    The mean is subtracted where 1 is among the `moments`.
    """
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
    """Means over the dims `at`, which have `count` elements on all ranks together. `total` sums over
    ranks."""

    at: Sequence[int]
    count: int
    total: Callable[[Tensor], Tensor]

    def means(self, *values: Tensor) -> Sequence[Tensor]:
        """The mean of each value, with one all-reduce for all."""
        sums = torch.stack([value.sum(self.at, keepdim=True) for value in values])
        return (self.total(sums) / self.count).unbind()


class _Normed(Function):
    """A norm whose only saved tensor of full size is its input; statistics are saved too."""

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
    """Statistics of every group, of which a rank may have some channels or none."""
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
"""Kernels of norms and softmax by operator kind."""


# Losses

IGNORED = -100
"""A target without a loss: the default `ignore_index` of PyTorch's cross entropy."""


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
    """The negative log-likelihood of each row's target.

    The gradient overwrites the log-probabilities that are saved for it: the logits are the largest tensors of
    many models.
    """

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
    """The same with the classes sharded: ranks all-reduce the maximum, the sum and the target's logit.

    The saved exponentials are overwritten by the gradient.
    """

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
    """At least fp32, which sums of many numbers need."""
    return rows.dtype if rows.dtype.itemsize >= 4 else torch.float32


def _mean(work: ShardedOperator, each: Tensor, dims: Dims) -> Tensor:
    """Sum over the dims that the output does not have, divided by their full size: this rank's part of a
    mean."""
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
"""Kernels of losses by operator kind."""
