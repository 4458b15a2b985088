"""What a rank computes of functions of elements, of reductions and of tensors in another shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.graph import OpNode
from shardwise.runtime.graphs.work import Kernel, ShardedOperator, aligned, arranged, without

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
"""Those of which the name says all."""

SCALAR_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "scale": lambda number, x: number * x,
    "shift": lambda number, x: x + number,
    "power": lambda number, x: x**number,
    "masked_fill": lambda number, x, mask: x.masked_fill(mask > 0, number),
}
"""Those of which the name and the operator's `number` say all."""


def element_function(op: OpNode) -> Callable[..., Tensor]:
    """The function of an elementwise operator by its graph. ConfigError where only the module that the graph
    was captured from can tell it."""
    name = str(op.attributes["function"])
    if name in SCALAR_FUNCTIONS and "number" in op.attributes:
        return partial(SCALAR_FUNCTIONS[name], float(op.attributes["number"]))
    if name not in ELEMENT_FUNCTIONS:
        raise ConfigError(
            f"of operator {op.name} does not say what is computed",
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
    """The second half of a head's elements turned into the first, and back."""
    op = work.op
    if len(inputs) != 3:
        raise ConfigError(
            f"of operator {op.name} does not say by which angles", key="inputs", found=str(len(inputs)),
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
"""By kind."""
