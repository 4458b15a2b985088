"""Elementwise functions, broadcast to the dims of the output; rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.graph.kinds.kind import Attribute, OperatorKind, dims_of, dims_text, refuse, text_of, without
from shardwise.graph.record import KernelWork, Moved, OpNode, SavedTensors
from shardwise.graph.rules import ShardingRule, operands_of, partial_rule, split_rules

MOST_OPERANDS = 8


@dataclass(frozen=True, slots=True)
class Function:
    """An elementwise function.

    It takes `least` to `most` operands and is linear in each group of `linear` (None: in all together). Its
    backward pass reads the operands `saves`, the output if `saves_output`, a mask if `saves_mask`.
    `passes_gradient` says that the gradient is passed on unchanged. `has_number` functions have an attribute
    `number`.
    """

    least: int
    most: int
    linear: tuple[tuple[int, ...], ...] | None = ()
    saves: tuple[int, ...] = ()
    saves_output: bool = False
    saves_mask: bool = False
    passes_gradient: bool = False
    has_number: bool = False


_SUM = Function(1, MOST_OPERANDS, linear=None, passes_gradient=True)
_LINEAR = Function(1, 1, linear=None)
_OF_INPUT = Function(1, 1, saves=(0,))
_OF_OUTPUT = Function(1, 1, saves_output=True)

FUNCTIONS: Mapping[str, Function] = {
    "add": _SUM,
    "subtract": Function(2, 2, linear=None, passes_gradient=True),
    "identity": Function(1, 1, linear=None, passes_gradient=True),
    "negate": _LINEAR,
    "scale": Function(1, 1, linear=None, has_number=True),
    "shift": Function(1, 1, passes_gradient=True, has_number=True),
    "masked_fill": Function(2, 2, saves=(1,), has_number=True),
    "dropout": Function(1, 1, linear=None, saves_mask=True),
    "multiply": Function(2, 2, linear=((0,), (1,)), saves=(0, 1)),
    "divide": Function(2, 2, linear=((0,),), saves=(0, 1)),
    "silu_multiply": Function(2, 2, linear=((1,),), saves=(0, 1)),
    "gelu_multiply": Function(2, 2, linear=((1,),), saves=(0, 1)),
    "where": Function(3, 3, linear=((1, 2),), saves=(0,)),
    "maximum": Function(2, 2, saves=(0, 1)),
    "minimum": Function(2, 2, saves=(0, 1)),
    "relu": _OF_OUTPUT,
    "sigmoid": _OF_OUTPUT,
    "tanh": _OF_OUTPUT,
    "exp": _OF_OUTPUT,
    "sqrt": _OF_OUTPUT,
    "rsqrt": _OF_OUTPUT,
    "gelu": _OF_INPUT,
    "silu": _OF_INPUT,
    "log": _OF_INPUT,
    "square": _OF_INPUT,
    "power": Function(1, 1, saves=(0,), has_number=True),
    "softplus": _OF_INPUT,
    "clamp": _OF_INPUT,
    "nonlinear": Function(1, MOST_OPERANDS, saves=tuple(range(MOST_OPERANDS))),
}
"""Functions by name; `nonlinear` is any other. A `shift` adds a number to its operand, or subtracts the
operand from a number. It is not linear: each rank would add the number to its partial sum."""


def _function(op: OpNode) -> Function:
    return FUNCTIONS[text_of(op, "function", "")]


def _check_elementwise(op: OpNode) -> None:
    function, operands = _function(op), operands_of(op)
    if not function.least <= len(operands) <= function.most:
        counts = (
            str(function.least) if function.least == function.most else f"{function.least} to {function.most}"
        )
        raise refuse(
            op,
            f"{text_of(op, 'function', '')} has a wrong number of operands",
            key="inputs",
            found=str(len(operands)),
            allowed=counts,
        )
    if "number" in op.attributes and not function.has_number:
        numbered = ", ".join(name for name, each in FUNCTIONS.items() if each.has_number)
        raise refuse(
            op,
            f"has a number, which {text_of(op, 'function', '')} does not take",
            key="attributes.number",
            found=str(op.attributes["number"]),
            allowed=f"no number, or one of {numbered}",
        )
    check_broadcast(op)


def check_broadcast(op: OpNode) -> None:
    """ConfigError for an operand with dims that the output does not have."""
    for operand in operands_of(op):
        lost = without(operand, op.output)
        if lost:
            raise refuse(
                op,
                "loses dims of an operand",
                key="output",
                found=dims_text(op.output),
                allowed=f"every dim of [{dims_text(operand)}]",
            )


def _elementwise_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    function = _function(op)
    every = tuple(range(len(operands_of(op))))
    groups = (every,) if function.linear is None else function.linear
    partial = (partial_rule(op, group) for group in groups if min(group) < len(op.inputs))
    return (*split_rules(op, op.output), *partial)


def _elementwise_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The forward pass reads the operands and writes the output. The backward pass reads the gradient and the
    saved tensors and writes the gradients; a sum passes its gradient on, summed where it was broadcast."""
    function, operands = _function(op), operands_of(op)
    if text_of(op, "function", "") == "identity" and operands[0] == op.output:
        return ()
    if function.passes_gradient:
        summed = [operand for operand in operands if set(operand) != set(op.output)]
        backward = 1.0 if summed else 0.0
        moved = [Moved(operand, 1.0, float(operand in summed)) for operand in operands]
        return (KernelWork(kind="memory", moved=(*moved, Moved(op.output, 1.0, backward))),)
    moved = [Moved(operand, 1.0, 1.0 + (index in function.saves)) for index, operand in enumerate(operands)]
    mask = (Moved(op.output, 1.0, 1.0, element_bytes=1.0),) if function.saves_mask else ()
    return (
        KernelWork(kind="memory", moved=(*moved, Moved(op.output, 1.0, 1.0 + function.saves_output), *mask)),
    )


def _elementwise_saved(op: OpNode) -> SavedTensors:
    function = _function(op)
    return SavedTensors(
        inputs=tuple(index for index in function.saves if index < len(op.inputs)),
        output=function.saves_output,
        own=((op.output, 1.0),) if function.saves_mask else (),
    )


ELEMENTWISE = OperatorKind(
    name="elementwise",
    summary="A function of one element of each operand, with broadcasting: an operand without a dim of the "
    "output is the same along it.",
    operands="inputs, then parameters, whose dims the output has",
    inputs=(1, MOST_OPERANDS),
    parameters=(0, MOST_OPERANDS),
    attributes=(
        Attribute(
            name="function",
            type="text",
            meaning="the function; `nonlinear` is any that is not listed",
            choices=tuple(FUNCTIONS),
            required=True,
        ),
        Attribute(
            name="number",
            type="number",
            meaning="factor of `scale`, summand of `shift`, exponent of `power`, value of `masked_fill`",
        ),
    ),
    check=_check_elementwise,
    splits=_elementwise_rules,
    work=_elementwise_work,
    saved=_elementwise_saved,
)


def _rotated(op: OpNode) -> tuple[str, ...]:
    return dims_of(op, "over", op.output[-1:])


def _rotary_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    return (*split_rules(op, without(op.output, _rotated(op))), partial_rule(op, (0,)))


def _rotary_work(op: OpNode) -> tuple[KernelWork, ...]:
    return (KernelWork(kind="memory", moved=tuple(Moved(dims) for dims in (*operands_of(op), op.output))),)


def _rotary_saved(op: OpNode) -> SavedTensors:
    return SavedTensors(inputs=tuple(range(1, len(op.inputs))))


ROTARY = OperatorKind(
    name="rotary",
    summary="Rotary position embedding: rotates pairs of elements of a head by an angle of their position.",
    operands="the activation; at most two tables of cosines and sines",
    inputs=(1, 3),
    attributes=(
        Attribute(name="over", type="dims", meaning="the dim whose elements are paired; default: the last"),
    ),
    check=check_broadcast,
    splits=_rotary_rules,
    work=_rotary_work,
    saved=_rotary_saved,
)
