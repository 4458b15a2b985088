"""Pooling: one number of each window."""

from __future__ import annotations

from shardwise.graph.dividing import partial_rule, split_rules
from shardwise.graph.kinds.kind import Attribute, OperatorKind, dims_text, integer_of, refuse, text_of
from shardwise.graph.kinds.windows import PADDING, halo_rows, spatial_rules
from shardwise.graph.record import OpNode
from shardwise.graph.rule import ShardingRule
from shardwise.graph.work import KernelWork, Moved, SavedTensors

INDEX_BYTES = 8.0
"""Maximum pooling keeps the place of each maximum."""


def _pool_spatial(op: OpNode) -> int:
    return integer_of(op, "spatial", 2)


def _pool_window(op: OpNode, rows: int, windows: int) -> tuple[int, int]:
    """Kernel and stride; adaptive windows, where no kernel is given, share the rows as evenly as they go."""
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
            f"changes its last {spatial} dims",
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
                f"has another number of windows in {op.dims[read]} rows of {read}",
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
