"""Losses: means over the dims that the output does not have; a part of the batch gives a partial sum."""

from __future__ import annotations

from shardwise.graph.kinds.kind import OperatorKind, dims_text, refuse, without
from shardwise.graph.kinds.normalization import STATISTIC_BYTES
from shardwise.graph.record import KernelWork, Moved, OpNode, SavedTensors
from shardwise.graph.rules import (
    REPLICATE,
    CollectiveCall,
    ShardingRule,
    operands_of,
    split_rule,
    split_rules,
)

LOGIT_BYTES = 4.0
"""Bytes of a logit: cross entropy works in fp32."""


def _classes(op: OpNode) -> tuple[str, ...]:
    logits, targets = operands_of(op)
    return without(logits, targets)


def _check_cross_entropy(op: OpNode) -> None:
    logits, targets = operands_of(op)
    classes = _classes(op)
    if len(classes) != 1 or without(targets, logits) or without(op.output, targets):
        raise refuse(
            op,
            "needs logits with one dim more than its targets",
            found=f"logits [{dims_text(logits)}], targets [{dims_text(targets)}], "
            f"output [{dims_text(op.output)}]",
            allowed="logits [b, s, v], targets [b, s], output [] or some of [b, s]",
        )


def _cross_entropy_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. With sharded classes, ranks all-reduce the maximum, the sum and the target's logit of
    each row."""
    rows = operands_of(op)[1]
    call = CollectiveCall(
        collective="all_reduce", dims=rows, forward_calls=3, backward_calls=0, element_bytes=STATISTIC_BYTES
    )
    return (
        *split_rules(op, rows),
        *(split_rule(op, dim, output=REPLICATE, collectives=(call,)) for dim in _classes(op)),
    )


def _cross_entropy_work(op: OpNode) -> tuple[KernelWork, ...]:
    """Passes over the logits: read and written for maximum and sum, read for the loss; read and written for
    the gradient."""
    return (
        KernelWork(kind="memory", moved=(Moved(op.inputs[0].dims, 3.0, 2.0, element_bytes=LOGIT_BYTES),)),
    )


def _cross_entropy_saved(op: OpNode) -> SavedTensors:
    """The logits in fp32, and the targets."""
    return SavedTensors(inputs=(1,), own=((op.inputs[0].dims, LOGIT_BYTES),))


CROSS_ENTROPY = OperatorKind(
    name="cross_entropy",
    summary="Mean cross entropy of softmax over the classes.",
    operands="logits; targets, without gradient",
    inputs=(2, 2),
    check=_check_cross_entropy,
    splits=_cross_entropy_rules,
    work=_cross_entropy_work,
    saved=_cross_entropy_saved,
)


def _check_difference(op: OpNode) -> None:
    prediction, target = operands_of(op)
    if without(target, prediction) or without(op.output, prediction):
        raise refuse(
            op,
            "needs a target and an output with dims of the prediction",
            found=f"prediction [{dims_text(prediction)}], target [{dims_text(target)}], "
            f"output [{dims_text(op.output)}]",
            allowed=f"some of [{dims_text(prediction)}]",
        )


def _difference_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    return split_rules(op, op.inputs[0].dims)


def _difference_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The forward pass reads both; the backward pass reads both and writes the gradients."""
    return (KernelWork(kind="memory", moved=tuple(Moved(operand, 1.0, 2.0) for operand in operands_of(op))),)


def _difference_saved(op: OpNode) -> SavedTensors:
    return SavedTensors(inputs=(0, 1))


def _difference(name: str, summary: str) -> OperatorKind:
    return OperatorKind(
        name=name,
        summary=summary,
        operands="prediction; target",
        inputs=(2, 2),
        check=_check_difference,
        splits=_difference_rules,
        work=_difference_work,
        saved=_difference_saved,
    )


MEAN_SQUARE = _difference("mean_square", "Mean square of the difference.")
BINARY_CROSS_ENTROPY = _difference(
    "binary_cross_entropy", "Mean cross entropy of the sigmoid of each prediction."
)
