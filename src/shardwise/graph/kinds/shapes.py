"""Reshape, transpose, concat and slice."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardwise.graph.kinds.kind import (
    Attribute,
    OperatorKind,
    dims_of,
    dims_text,
    integer_of,
    no_work,
    nothing_saved,
    refuse,
    without,
)
from shardwise.graph.record import KernelWork, Moved, OpNode
from shardwise.graph.rules import ShardingRule, operands_of, partial_rule, split_rule, split_rules

Dims = tuple[str, ...]


def _groups(op: OpNode) -> Iterator[tuple[Dims, Dims]]:
    """The shortest runs of adjacent dims of input and output with equally many elements.

    Trailing dims of size 1 are left out.
    """
    before, after = op.inputs[0].dims, op.output
    left = right = 0
    while left < len(before) and right < len(after):
        start, first = left, right
        left, right = left + 1, right + 1
        while True:
            read, made = op.elements(before[start:left]), op.elements(after[first:right])
            if read == made:
                break
            if read < made:
                left += 1
            else:
                right += 1
            if left > len(before) or right > len(after):
                return
        yield before[start:left], after[first:right]


def _outermost(op: OpNode, dims: Dims) -> str:
    """The first dim with more than one element."""
    return next((dim for dim in dims if op.dims[dim] > 1), dims[0])


def _check_reshape(op: OpNode) -> None:
    read, made = op.elements(op.inputs[0].dims), op.elements(op.output)
    if read != made:
        raise refuse(
            op,
            "needs an output with as many elements as its input",
            key="output",
            found=f"{made} from {read}",
            allowed=f"dims of {read} elements",
        )


def _reshape_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. A run of dims is split along its outermost dim, where parts of the input are parts of
    the output."""
    rules = []
    for before, after in _groups(op):
        read, made = _outermost(op, before), _outermost(op, after)
        units = gcd(op.dims[read], op.dims[made])
        rules.append(split_rule(op, made, also=(read,), units=units))
    return (*rules, partial_rule(op, (0,)))


RESHAPE = OperatorKind(
    name="reshape",
    summary="Merges neighbouring dims, or splits one dim into several; moves no elements.",
    operands="one input of as many elements as the output",
    inputs=(1, 1),
    check=_check_reshape,
    splits=_reshape_rules,
    work=no_work,
    saved=nothing_saved,
)


def _check_transpose(op: OpNode) -> None:
    if sorted(op.output) != sorted(op.inputs[0].dims):
        raise refuse(
            op,
            "needs an output with the dims of its input in another order",
            key="output",
            found=dims_text(op.output),
            allowed=f"an order of [{dims_text(op.inputs[0].dims)}]",
        )


def _transpose_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    return (*split_rules(op, op.output), partial_rule(op, (0,)))


def _transpose_work(op: OpNode) -> tuple[KernelWork, ...]:
    moved = (Moved(op.inputs[0].dims), Moved(op.output))
    return (KernelWork(kind="memory", moved=moved),) if op.attributes.get("copies") else ()


TRANSPOSE = OperatorKind(
    name="transpose",
    summary="The dims in another order.",
    operands="one input",
    inputs=(1, 1),
    attributes=(Attribute(name="copies", type="flag", meaning="whether elements are moved"),),
    check=_check_transpose,
    splits=_transpose_rules,
    work=_transpose_work,
    saved=nothing_saved,
)  # fmt: skip


def _joined(op: OpNode) -> str:
    """The output dim along which inputs are joined: one that an input does not have, or `over`.

    The output has at least one dim.
    """
    own = [dim for dim in op.output if any(dim not in operand for operand in operands_of(op))]
    return dims_of(op, "over", own or op.output[:1])[0]


def _parts_of_joined(op: OpNode) -> Dims:
    at = op.output.index(_joined(op))
    return tuple(operand[at] for operand in operands_of(op))


def _check_concat(op: OpNode) -> None:
    if not op.output:
        raise refuse(
            op,
            "needs a dim along which its inputs follow each other",
            key="output",
            found="[], a scalar",
            allowed="the dims of the inputs, with the joined one by a name of its own",
        )
    joined = _joined(op)
    at = op.output.index(joined) if joined in op.output else -1
    rest = without(op.output, (joined,))
    fits = at >= 0 and all(
        len(operand) == len(op.output) and operand[:at] + operand[at + 1 :] == rest
        for operand in operands_of(op)
    )
    if not fits or sum(op.dims[operand[at]] for operand in operands_of(op)) != op.dims[joined]:
        raise refuse(
            op,
            "needs inputs that differ in one dim, whose sizes make that of the output",
            key="inputs",
            found="; ".join(f"[{dims_text(operand)}]" for operand in operands_of(op)),
            allowed=f"[{dims_text(op.output)}] with parts of {joined} by names of their own",
        )


def _concat_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    whole = {_joined(op), *_parts_of_joined(op)}
    every = range(len(operands_of(op)))
    return (*split_rules(op, without(op.output, tuple(whole))), partial_rule(op, every))


def _concat_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The forward pass copies; gradients are views."""
    moved = tuple(Moved(dims, 1.0, 0.0) for dims in (*operands_of(op), op.output))
    return (KernelWork(kind="memory", moved=moved),)


CONCAT = OperatorKind(
    name="concat",
    summary="Concatenates inputs along one dim, which is not split.",
    operands="inputs and parameters with the output's dims, except that each has its own name for its part "
    "of the joined dim",
    inputs=(1, 64),
    parameters=(0, 8),
    attributes=(Attribute(name="over", type="dim", meaning="the joined dim, if names do not determine it"),),
    check=_check_concat,
    splits=_concat_rules,
    work=_concat_work,
    saved=nothing_saved,
)


def _check_slice(op: OpNode) -> None:
    dims = op.inputs[0].dims
    made = without(op.output, dims)
    cut = without(dims, op.output)
    fits = len(made) <= len(cut) and (len(made) in (0, len(cut)))
    sizes_fit = fits and all(op.dims[new] <= op.dims[old] for new, old in zip(made, cut, strict=False))
    if not cut or not sizes_fit:
        raise refuse(
            op,
            "needs dims that it slices, all replaced by smaller ones or all dropped",
            key="output",
            found=dims_text(op.output),
            allowed=f"[{dims_text(dims)}] with new names for the dims that are sliced",
        )
    start = integer_of(op, "start", 0)
    ends = [(start + (op.dims[made[0]] if made else 1), op.dims[cut[0]])]
    if any(end > size for end, size in ends):
        raise refuse(
            op,
            "slices beyond the end of its input",
            key="attributes.start",
            found=str(start),
            allowed=f"at most {ends[0][1] - (ends[0][0] - start)}",
        )


def _slice_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    uncut = tuple(dim for dim in op.output if dim in op.inputs[0].dims)
    return (*split_rules(op, uncut), partial_rule(op, (0,)))


def _slice_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The forward pass is a view; the backward pass copies the gradient into its place."""
    return (KernelWork(kind="memory", moved=(Moved(op.output, 0.0, 2.0),)),)


SLICE = OperatorKind(
    name="slice",
    summary="A run of elements along a dim, which is not split; or one element, which removes the dim.",
    operands="one input",
    inputs=(1, 1),
    attributes=(Attribute(name="start", type="integer", meaning="the first element; default 0"),),
    check=_check_slice,
    splits=_slice_rules,
    work=_slice_work,
    saved=nothing_saved,
)
