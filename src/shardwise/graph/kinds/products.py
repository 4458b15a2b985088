"""Sums of products (einsum, matmul, linear), and embedding (rows of a table by index)."""

from __future__ import annotations

from itertools import combinations

from shardwise.graph.kinds.kind import OperatorKind, dims_text, input_saved, refuse, without
from shardwise.graph.record import KernelWork, Moved, OpNode, SavedTensors
from shardwise.graph.rules import ShardingRule, operands_of, product_rules

# Sums of products

Dims = tuple[str, ...]


def _check_product(op: OpNode) -> None:
    read = {dim for operand in operands_of(op) for dim in operand}
    missing = [dim for dim in op.output if dim not in read]
    if missing:
        raise refuse(
            op,
            "makes dims that none of its operands has",
            key="output",
            found=dims_text(missing),
            allowed="dims of inputs and parameters",
        )


def _check_matmul(op: OpNode) -> None:
    _check_product(op)
    first, second = operands_of(op)
    if not set(first) & set(second) - set(op.output):
        raise refuse(
            op,
            "sums over no dim",
            found=f"[{dims_text(first)}] and [{dims_text(second)}]",
            allowed="a dim that both operands have and the output has not",
        )


def _check_linear(op: OpNode) -> None:
    weight = op.parameters[0].dims
    features = [dim for dim in weight if dim in op.output]
    if not set(weight) & set(op.inputs[0].dims) - set(op.output) or not features:
        raise refuse(
            op,
            "needs a weight with dims of the input and dims of the output",
            key=f"parameters.{op.parameters[0].name}",
            found=dims_text(weight),
            allowed=f"dims of [{dims_text(op.inputs[0].dims)}] and of [{dims_text(op.output)}]",
        )
    _check_product(op)
    for bias in op.parameters[1:]:
        if not set(bias.dims) <= set(op.output):
            raise refuse(
                op,
                "adds a bias with dims that its output has not",
                key=f"parameters.{bias.name}",
                found=dims_text(bias.dims),
                allowed=f"some of [{dims_text(op.output)}]",
            )


def _einsum_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    return product_rules(op, linear=[(index,) for index in range(len(op.inputs))])


def _linear_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    return product_rules(op, linear=[(0,)], added=range(2, len(operands_of(op))))


def _contraction(left: Dims, right: Dims, needed: set[str]) -> tuple[KernelWork, Dims]:
    """The product of two tensors, and the dims of its result: those `needed` afterwards. Without a summed dim
    it is memory-bound."""
    both = [dim for dim in left if dim in right]
    every = tuple(dict.fromkeys((*left, *right)))
    result = tuple(dim for dim in every if dim in needed)
    summed = tuple(dim for dim in every if dim not in needed)
    if not summed:
        return KernelWork(
            kind="memory", moved=(Moved(left, 1.0, 2.0), Moved(right, 1.0, 2.0), Moved(result))
        ), result
    work = KernelWork(
        kind="matmul",
        batch=tuple(dim for dim in both if dim in needed),
        m=tuple(dim for dim in left if dim not in right and dim in needed),
        n=tuple(dim for dim in right if dim not in left and dim in needed),
        k=summed,
    )
    return work, result


def _einsum_work(op: OpNode) -> tuple[KernelWork, ...]:
    """Two operands at a time, the pair with the fewest products first; a single operand is read and
    summed."""
    rest = list(operands_of(op))
    if len(rest) == 1:
        return (KernelWork(kind="memory", moved=(Moved(rest[0]), Moved(op.output))),)
    works = []
    while len(rest) > 1:
        left, right = min(
            combinations(range(len(rest)), 2),
            key=lambda pair: op.elements(tuple({*rest[pair[0]], *rest[pair[1]]})),
        )
        others = [dims for at, dims in enumerate(rest) if at not in (left, right)]
        needed = {*op.output, *(dim for dims in others for dim in dims)}
        work, result = _contraction(rest[left], rest[right], needed)
        works.append(work)
        rest = [result, *others]
    return tuple(works)


def _linear_work(op: OpNode) -> tuple[KernelWork, ...]:
    return (_contraction(op.inputs[0].dims, op.parameters[0].dims, set(op.output))[0],)


def _einsum_saved(op: OpNode) -> SavedTensors:
    """Every input: the gradients of the other operands need it."""
    return SavedTensors(inputs=tuple(range(len(op.inputs))) if len(operands_of(op)) > 1 else ())


EINSUM = OperatorKind(
    name="einsum",
    summary="Any contraction: the product of all operands, summed over the dims that the output lacks.",
    operands="inputs and parameters with any dims, at least one; the output has any of theirs",
    inputs=(1, 8),
    parameters=(0, 8),
    check=_check_product,
    splits=_einsum_rules,
    work=_einsum_work,
    saved=_einsum_saved,
)

MATMUL = OperatorKind(
    name="matmul",
    summary="The product of two activations, summed over the dims that the output lacks; the dims that all "
    "three tensors have are a batch of products.",
    operands="two inputs",
    inputs=(2, 2),
    check=_check_matmul,
    splits=_einsum_rules,
    work=_einsum_work,
    saved=_einsum_saved,
)

LINEAR = OperatorKind(
    name="linear",
    summary="The product of an activation and a weight, plus a bias.",
    operands="one input; a weight, then at most one bias with dims of the output",
    inputs=(1, 1),
    parameters=(1, 2),
    check=_check_linear,
    splits=_linear_rules,
    work=_linear_work,
    saved=input_saved,
)


# Embedding


def _check(op: OpNode) -> None:
    indices, table = operands_of(op)
    rows = without(table, (*indices, *op.output))
    if len(rows) != 1 or set(op.output) - {*indices, *table}:
        raise refuse(
            op,
            "needs a table with one dim that neither indices nor output have",
            key=f"parameters.{op.parameters[0].name}",
            found=f"table [{dims_text(table)}], indices [{dims_text(indices)}], "
            f"output [{dims_text(op.output)}]",
            allowed="table [v, e], indices [b, s], output [b, s, e], or the same with a dim of tables in all",
        )


def _rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. Every dim may be split: a rank makes zeros for rows of other ranks, which gives partial
    sums."""
    return product_rules(op, linear=())


def _work(op: OpNode) -> tuple[KernelWork, ...]:
    """Reads and writes each row once; the backward pass reads the gradient and adds it to fp32 rows."""
    rows = tuple(dict.fromkeys((*op.inputs[0].dims, *op.output)))
    return (
        KernelWork(kind="memory", moved=(Moved(rows, 2.0, 1.0), Moved(rows, 0.0, 2.0, element_bytes=4.0))),
    )


EMBEDDING = OperatorKind(
    name="embedding",
    summary="A row of a table for each index; rows along a dim that the output lacks are summed (a bag).",
    operands="indices, without gradient; a table",
    inputs=(1, 1),
    parameters=(1, 1),
    check=_check,
    splits=_rules,
    work=_work,
    saved=input_saved,
)
