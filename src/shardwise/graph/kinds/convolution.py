"""Convolution and pooling: windows over the last dims of a tensor, with halo rows where those dims are
sharded."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import ConfigError
from shardwise.graph.kinds.kind import (
    Attribute,
    OperatorKind,
    dims_text,
    input_saved,
    integer_of,
    refuse,
    text_of,
    without,
)
from shardwise.graph.record import KernelWork, Moved, OpNode, SavedTensors
from shardwise.graph.rules import (
    CollectiveCall,
    ShardingRule,
    operands_of,
    partial_rule,
    split_rule,
    split_rules,
)

# Windows

PADDING = Attribute(name="padding", type="integer", meaning="rows of padding on either side; default 0")


def halo_rows(rows: int, windows: int, *, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The most halo rows that a rank needs of a neighbour, where `rows` and `windows` are both split evenly.

    Windows begin at row `stride` w - `padding` and are `dilation` (`kernel` - 1) + 1 long. With a share f of
    rows and windows on earlier ranks, a rank's rows begin at rows * f and its windows at windows * f. It
    needs stride * windows * f - padding >= rows * f - halo, and likewise at its end.
    """
    shift = rows - stride * windows
    before = padding + max(shift, 0)
    after = dilation * (kernel - 1) + 1 - stride - padding + max(-shift, 0)
    return max(before, after, 0) if windows > 1 else 0


def spatial_rules(op: OpNode, spatial: int, halos: Sequence[int]) -> tuple[ShardingRule, ...]:
    """Rules that split each of the last `spatial` dims, with halo rows forward and their gradients
    backward."""
    before, after = op.inputs[0].dims, op.output
    rules = []
    for read, made, halo in zip(before[-spatial:], after[-spatial:], halos, strict=True):
        call = CollectiveCall(collective="neighbours", dims=without(before, (read,)), copies=halo)
        rules.append(split_rule(op, made, also=(read,), collectives=(call,) if halo else ()))
    return tuple(rules)


# Convolution

Dims = tuple[str, ...]


def _kernel_dims(op: OpNode) -> Dims:
    """The kernel dims: those of the weight only, without the dim of channels within a group."""
    own = without(op.parameters[0].dims, (*op.inputs[0].dims, *op.output))
    return own[1:] if integer_of(op, "groups", 1) > 1 else own


def _channels(op: OpNode) -> tuple[str, str]:
    """The channel dims of input and output: those before the spatial ones."""
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
                op,
                "needs a bias with the channel dim",
                key="parameters",
                found=dims_text(bias.dims),
                allowed=made,
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
        "does not have the dims of a convolution",
        found=f"input [{dims_text(op.inputs[0].dims)}], weight [{dims_text(op.parameters[0].dims)}], "
        f"output [{dims_text(op.output)}]",
        allowed="input [b, c, y, x], weight [o, c, i, j], output [b, o, h, w]; with `groups` a weight "
        "[o, k, i, j]; depthwise c in all and a weight [c, i, j]",
    )


def _check_windows(op: OpNode, rows: str, windows: str, kernel: int) -> None:
    """ConfigError where the output does not have as many windows as fit."""
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
    """Sharding rules. Groups of channels are split together; within a group, output channels of a whole
    input."""
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
    """A matmul of windows and filters; for a depthwise convolution one per channel."""
    kernel = _kernel_dims(op)
    read, made = _channels(op)
    after, weight = op.output, op.parameters[0].dims
    rows = without(after, (made,))
    if read == made:
        return (KernelWork(kind="matmul", batch=(made,), m=rows, k=kernel),)
    return (KernelWork(kind="matmul", m=rows, n=(made,), k=weight[1:], splits_sums=True),)


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
    saved=input_saved,
)


# Pooling

INDEX_BYTES = 8.0
"""Bytes of the index of each maximum, which maximum pooling saves."""


def _pool_spatial(op: OpNode) -> int:
    return integer_of(op, "spatial", 2)


def _pool_window(op: OpNode, rows: int, windows: int) -> tuple[int, int]:
    """Kernel and stride. Without a kernel windows are adaptive: they divide the rows as evenly as
    possible."""
    if "kernel" in op.attributes:
        kernel = integer_of(op, "kernel", 1)
        return kernel, integer_of(op, "stride", kernel)
    return -(-rows // windows) + (1 if rows % windows else 0), rows // windows


def _check_pool(op: OpNode) -> None:
    spatial = _pool_spatial(op)
    before, after = op.inputs[0].dims, op.output
    if len(before) != len(after) or len(before) < spatial or before[:-spatial] != after[:-spatial]:
        raise refuse(
            op,
            f"can change its last {spatial} dims only",
            key="output",
            found=f"[{dims_text(after)}] from [{dims_text(before)}]",
            allowed="[b, c, h, w] from [b, c, y, x]",
        )
    for read, made in zip(before[-spatial:], after[-spatial:], strict=True):
        if "kernel" in op.attributes:
            kernel, stride = _pool_window(op, op.dims[read], op.dims[made])
            extent = op.dims[read] + 2 * integer_of(op, "padding", 0) - kernel
            fits = extent >= 0 and op.dims[made] in (extent // stride + 1, -(-extent // stride) + 1)
        else:
            fits = op.dims[made] <= op.dims[read]
        if not fits:
            raise refuse(
                op,
                f"has a wrong number of windows in {op.dims[read]} rows of {read}",
                key="output",
                found=f"{made} = {op.dims[made]}",
                allowed=f"{made} = ({read} + 2 padding - kernel) / stride + 1; with no kernel at most {read}",
            )


def _pool_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    spatial = _pool_spatial(op)
    before, after = op.inputs[0].dims, op.output
    halos = []
    for read, made in zip(before[-spatial:], after[-spatial:], strict=True):
        rows, windows = op.dims[read], op.dims[made]
        kernel, stride = _pool_window(op, rows, windows)
        padding = integer_of(op, "padding", 0)
        halos.append(halo_rows(rows, windows, kernel=kernel, stride=stride, padding=padding, dilation=1))
    partial = (partial_rule(op, (0,)),) if text_of(op, "function", "") == "average" else ()
    return (*split_rules(op, after[:-spatial]), *spatial_rules(op, spatial, halos), *partial)


def _pool_work(op: OpNode) -> tuple[KernelWork, ...]:
    return (KernelWork(kind="memory", moved=(Moved(op.inputs[0].dims), Moved(op.output))),)


def _pool_saved(op: OpNode) -> SavedTensors:
    if text_of(op, "function", "") == "average":
        return SavedTensors()
    return SavedTensors(inputs=(0,), own=((op.output, INDEX_BYTES),))


POOL = OperatorKind(
    name="pool",
    summary="Maximum or average of windows of the last dims. Without a kernel the pool is adaptive: as many "
    "windows as the output has. For a pool over all rows at once use `reduce`.",
    operands="input [b, c, y, x]; output [b, c, h, w]",
    inputs=(1, 1),
    attributes=(
        Attribute(
            name="function",
            type="text",
            meaning="the reduction of a window",
            choices=("maximum", "average"),
            required=True,
        ),
        Attribute(name="kernel", type="integer", meaning="rows of a window", low=1),
        Attribute(
            name="stride", type="integer", meaning="rows from window to window; default: the kernel", low=1
        ),
        PADDING,
        Attribute(name="spatial", type="integer", meaning="dims with windows; default 2", low=1),
    ),
    check=_check_pool,
    splits=_pool_rules,
    work=_pool_work,
    saved=_pool_saved,
)
