"""Sum, mean, maximum and minimum over dims that the output has not."""

from __future__ import annotations

from shardwise.graph.dividing import partial_rule, split_rule, split_rules
from shardwise.graph.kinds.kind import Attribute, OperatorKind, dims_text, refuse, text_of, without
from shardwise.graph.placement import REPLICATE
from shardwise.graph.record import OpNode
from shardwise.graph.rule import CollectiveCall, ShardingRule
from shardwise.graph.work import KernelWork, Moved, SavedTensors

_LINEAR = ("sum", "mean")


def _check(op: OpNode) -> None:
    dims = op.inputs[0].dims
    if not without(dims, op.output) or without(op.output, dims):
        raise refuse(
            op,
            "reduces dims of its input",
            key="output",
            found=dims_text(op.output),
            allowed=f"some, but not all, of [{dims_text(dims)}]",
        )


def _is_linear(op: OpNode) -> bool:
    return text_of(op, "function", "") in _LINEAR


def _rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sums of parts are partial sums; of maxima of parts every rank needs the whole at once."""
    over = without(op.inputs[0].dims, op.output)
    if _is_linear(op):
        return (*split_rules(op, (*op.output, *over)), partial_rule(op, (0,)))
    call = CollectiveCall(collective="all_reduce", dims=op.output, backward_calls=0)
    return (
        *split_rules(op, op.output),
        *(split_rule(op, dim, output=REPLICATE, collectives=(call,)) for dim in over),
    )


def _work(op: OpNode) -> tuple[KernelWork, ...]:
    again = 1.0 if _is_linear(op) else 2.0
    return (
        KernelWork(kind="memory", moved=(Moved(op.inputs[0].dims, 1.0, again), Moved(op.output, 1.0, again))),
    )


def _saved(op: OpNode) -> SavedTensors:
    return SavedTensors() if _is_linear(op) else SavedTensors(inputs=(0,), output=True)


REDUCE = OperatorKind(
    name="reduce",
    summary="One number from all elements along the dims that the output lacks.",
    operands="one input",
    inputs=(1, 1),
    attributes=(
        Attribute(
            name="function",
            type="text",
            meaning="the reduction",
            choices=(*_LINEAR, "maximum", "minimum"),
            required=True,
        ),
    ),
    check=_check,
    splits=_rules,
    work=_work,
    saved=_saved,
)
