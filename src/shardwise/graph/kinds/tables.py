"""Embedding: rows of a table, by index."""

from __future__ import annotations

from shardwise.graph.dividing import operands_of, product_rules
from shardwise.graph.kinds.kind import OperatorKind, dims_text, refuse, without
from shardwise.graph.record import OpNode
from shardwise.graph.rule import ShardingRule
from shardwise.graph.work import KernelWork, Moved, SavedTensors


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
    """Every dim may be split: a rank that holds other rows of the table makes zeros, a partial sum."""
    return product_rules(op, linear=())


def _work(op: OpNode) -> tuple[KernelWork, ...]:
    """Reads and writes each row once; the backward reads the gradient and adds into fp32 rows."""
    rows = tuple(dict.fromkeys((*op.inputs[0].dims, *op.output)))
    return (
        KernelWork(kind="memory", moved=(Moved(rows, 2.0, 1.0), Moved(rows, 0.0, 2.0, element_bytes=4.0))),
    )


def _saved(op: OpNode) -> SavedTensors:
    return SavedTensors(inputs=(0,))


EMBEDDING = OperatorKind(
    name="embedding",
    summary="A row of a table for each index; rows along a dim that the output lacks are summed (a bag).",
    operands="indices, without gradient; a table",
    inputs=(1, 1),
    parameters=(1, 1),
    check=_check,
    splits=_rules,
    work=_work,
    saved=_saved,
)
