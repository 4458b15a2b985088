"""Convolution: windows of the input times filters."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.graph.dividing import operands_of, partial_rule, split_rule, split_rules
from shardwise.graph.kinds.kind import Attribute, OperatorKind, dims_text, integer_of, refuse, without
from shardwise.graph.kinds.windows import PADDING, halo_rows, spatial_rules
from shardwise.graph.record import OpNode
from shardwise.graph.rule import ShardingRule
from shardwise.graph.work import KernelWork, SavedTensors

Dims = tuple[str, ...]


def _kernel_dims(op: OpNode) -> Dims:
    """The dims of the weight that are neither the input's nor the output's, but for those of channels of a
    group."""
    own = without(op.parameters[0].dims, (*op.inputs[0].dims, *op.output))
    return own[1:] if integer_of(op, "groups", 1) > 1 else own


def _channels(op: OpNode) -> tuple[str, str]:
    """The dims of channels of input and output: those before the spatial ones."""
    at = -len(_kernel_dims(op)) - 1
    return op.inputs[0].dims[at], op.output[at]


def _check_convolution(op: OpNode) -> None:
    kernel, groups = _kernel_dims(op), integer_of(op, "groups", 1)
    before, after, weight = op.inputs[0].dims, op.output, op.parameters[0].dims
    if not kernel or len(before) <= len(kernel) or len(before) != len(after):
        raise _no_convolution(op)
    read, made = _channels(op)
    expected: Dims = (made,) if read == made else (made, read)
    if groups > 1:
        expected = (made, *weight[1:2])
    batch = before[: -len(kernel) - 1]
    if weight != (*expected, *kernel) or after[: len(batch)] != batch:
        raise _no_convolution(op)
    if groups > 1:
        _check_groups(op, groups, read, made, weight[1])
    for bias in op.parameters[1:]:
        if bias.dims != (made,):
            raise refuse(
                op, "adds a bias per channel", key="parameters", found=dims_text(bias.dims), allowed=made
            )
    for rows, windows, size in zip(before[-len(kernel) :], after[-len(kernel) :], kernel, strict=True):
        _check_windows(op, rows, windows, op.dims[size])


def _check_groups(op: OpNode, groups: int, read: str, made: str, within: str) -> None:
    sizes = op.dims
    if sizes[made] % groups or sizes[within] * groups != sizes[read]:
        raise refuse(
            op,
            "needs channels in whole groups",
            key="attributes.groups",
            found=", ".join((f"{groups} groups", *(f"{dim} = {sizes[dim]}" for dim in (read, within, made)))),
            allowed=f"a divisor of {read} and {made}, and {within} = {read} / groups",
        )


def _no_convolution(op: OpNode) -> ConfigError:
    return refuse(
        op,
        "cannot tell channels from rows",
        found=f"input [{dims_text(op.inputs[0].dims)}], weight [{dims_text(op.parameters[0].dims)}], "
        f"output [{dims_text(op.output)}]",
        allowed="input [b, c, y, x], weight [o, c, i, j], output [b, o, h, w]; with `groups` a weight "
        "[o, k, i, j]; depthwise c in all and a weight [c, i, j]",
    )


def _check_windows(op: OpNode, rows: str, windows: str, kernel: int) -> None:
    """Refuses an output with another number of windows than fit."""
    stride, padding = integer_of(op, "stride", 1), integer_of(op, "padding", 0)
    length = integer_of(op, "dilation", 1) * (kernel - 1) + 1
    extent = op.dims[rows] + 2 * padding - length
    expected = extent // stride + 1
    if extent < 0 or op.dims[windows] != expected:
        raise refuse(
            op,
            f"has {max(expected, 0)} windows in {op.dims[rows]} rows of {rows}",
            key="output",
            found=f"{windows} = {op.dims[windows]}",
            allowed=f"{windows} = ({rows} + 2 padding - dilation (kernel - 1) - 1) / stride + 1",
        )


def _convolution_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Groups of channels are split together; within them outputs of a whole input."""
    kernel, groups = _kernel_dims(op), integer_of(op, "groups", 1)
    spatial = len(kernel)
    read, made = _channels(op)
    bias = range(2, len(operands_of(op)))
    before, after = op.inputs[0].dims, op.output
    halos = [
        halo_rows(
            op.dims[rows], op.dims[windows], kernel=op.dims[size], stride=integer_of(op, "stride", 1),
            padding=integer_of(op, "padding", 0), dilation=integer_of(op, "dilation", 1),
        )
        for rows, windows, size in zip(before[-spatial:], after[-spatial:], kernel, strict=True)
    ]  # fmt: skip
    by_groups = (split_rule(op, made, also=(read,), units=groups),) if groups > 1 else ()
    made_name = f"split {made}, {read} whole" if groups > 1 else None
    return (
        *split_rules(op, after[: -spatial - 1]),
        *by_groups,
        split_rule(op, made, name=made_name),
        *spatial_rules(op, spatial, halos),
        *split_rules(op, (read,) if groups == 1 and read != made else (), added=bias),
        *split_rules(op, kernel, added=bias),
        partial_rule(op, (0,), added=bias),
    )


def _convolution_work(op: OpNode) -> tuple[KernelWork, ...]:
    """A matmul of windows and filters; depthwise one for each channel."""
    kernel = _kernel_dims(op)
    read, made = _channels(op)
    after, weight = op.output, op.parameters[0].dims
    rows = without(after, (made,))
    if read == made:
        return (KernelWork(kind="matmul", batch=(made,), m=rows, k=kernel),)
    return (KernelWork(kind="matmul", m=rows, n=(made,), k=weight[1:], splits_sums=True),)


def _convolution_saved(op: OpNode) -> SavedTensors:
    return SavedTensors(inputs=(0,))


CONVOLUTION = OperatorKind(
    name="convolution",
    summary="Windows of the input times filters, over one to three spatial dims.",
    operands="input [b, c, y, x]; weight [o, c, i, j], with `groups` [o, k, i, j] of k = c / groups, "
    "depthwise [c, i, j]; at most a bias [o]; output [b, o, h, w]",
    inputs=(1, 1),
    parameters=(1, 2),
    attributes=(
        Attribute(name="stride", type="integer", meaning="rows from window to window; default 1", low=1),
        PADDING,
        Attribute(name="dilation", type="integer", meaning="rows from tap to tap; default 1", low=1),
        Attribute(name="groups", type="integer", meaning="groups of channels; default 1", low=1),
    ),
    check=_check_convolution,
    splits=_convolution_rules,
    work=_convolution_work,
    saved=_convolution_saved,
)
