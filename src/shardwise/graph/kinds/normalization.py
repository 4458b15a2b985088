"""Reductions, norms and softmax: each needs statistics over some dims, all-reduced where those are
sharded."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.graph.kinds.kind import (
    Attribute,
    OperatorKind,
    dims_of,
    dims_text,
    integer_of,
    refuse,
    text_of,
    without,
)
from shardwise.graph.kinds.pointwise import check_broadcast
from shardwise.graph.record import KernelWork, Moved, OpNode, SavedTensors
from shardwise.graph.rules import (
    REPLICATE,
    CollectiveCall,
    ShardingRule,
    partial_rule,
    split_rule,
    split_rules,
)

# Reductions

_LINEAR = ("sum", "mean")


def _check(op: OpNode) -> None:
    dims = op.inputs[0].dims
    if not without(dims, op.output) or without(op.output, dims):
        raise refuse(
            op,
            "needs an output with some of the dims of its input",
            key="output",
            found=dims_text(op.output),
            allowed=f"some, but not all, of [{dims_text(dims)}]",
        )


def _is_linear(op: OpNode) -> bool:
    return text_of(op, "function", "") in _LINEAR


def _rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. Sums of shards are partial sums; maxima of shards are all-reduced at once."""
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


# Norms and softmax

STATISTIC_BYTES = 4.0
"""Bytes of a statistic: saved and all-reduced in fp32, whatever the dtype of the activations."""

_OVER = Attribute(name="over", type="dims", meaning="the dims of each statistic")


def _channel_dims(op: OpNode) -> tuple[str, ...]:
    """The dims of the scale; without a scale, the second dim."""
    return op.parameters[0].dims if op.parameters else op.output[1:2]


def _last_over(op: OpNode) -> tuple[str, ...]:
    return dims_of(op, "over", op.parameters[0].dims if op.parameters else op.output[-1:])


def _batch_over(op: OpNode) -> tuple[str, ...]:
    return dims_of(op, "over", without(op.output, _channel_dims(op)))


def _check_over(over: Callable[[OpNode], tuple[str, ...]]) -> Callable[[OpNode], None]:
    def check(op: OpNode) -> None:
        check_same(op)
        check_broadcast(op)
        if not over(op) or set(over(op)) - set(op.output):
            raise refuse(
                op,
                "needs dims of its input to normalise over",
                key="attributes.over",
                found=dims_text(over(op)),
                allowed=f"some of [{dims_text(op.output)}]",
            )

    return check


def check_same(op: OpNode) -> None:
    """ConfigError where the output does not have the dims of the first input."""
    if op.output != op.inputs[0].dims:
        raise refuse(
            op,
            "needs an output with the dims of its input",
            key="output",
            found=dims_text(op.output),
            allowed=dims_text(op.inputs[0].dims),
        )


def _norm(
    name: str, summary: str, statistics: int, over: Callable[[OpNode], tuple[str, ...]]
) -> OperatorKind:
    """A norm with `statistics` statistics over the dims `over`; its backward pass needs as many of the
    gradient."""

    def rules(op: OpNode) -> tuple[ShardingRule, ...]:
        rest = without(op.output, over(op))
        call = CollectiveCall(
            collective="all_reduce", dims=rest, copies=statistics, element_bytes=STATISTIC_BYTES
        )
        return (
            *split_rules(op, rest),
            *(split_rule(op, dim, collectives=(call,)) for dim in over(op)),
        )

    def saved(op: OpNode) -> SavedTensors:
        own = (without(op.output, over(op)), STATISTIC_BYTES)
        return SavedTensors(inputs=(0,), own=(own,) * statistics)

    return OperatorKind(
        name=name,
        summary=summary,
        operands="one input; at most a scale and a shift with dims of it",
        inputs=(1, 1),
        parameters=(0, 2),
        attributes=(_OVER,),
        check=_check_over(over),
        splits=rules,
        work=_norm_work,
        saved=saved,
    )


def _norm_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The forward pass reads and writes; the backward pass reads input and gradient and writes the
    gradient."""
    return (KernelWork(kind="memory", moved=(Moved(op.inputs[0].dims, 1.0, 2.0), Moved(op.output))),)


LAYER_NORM = _norm(
    "layer_norm",
    "Mean and variance over the dims of the scale (default: the last dim), for each of the others.",
    2,
    _last_over,
)
RMS_NORM = _norm(
    "rms_norm",
    "Mean square over the dims of the scale (default: the last dim), for each of the others.",
    1,
    _last_over,
)
BATCH_NORM = _norm(
    "batch_norm",
    "Mean and variance over all dims that the scale lacks (default: all but the second), over the whole "
    "batch: ranks that split the batch all-reduce them.",
    2,
    _batch_over,
)


def _channel(op: OpNode) -> str:
    """The channel dim; empty where none is named and neither the scale nor the output has one."""
    return "".join(dims_of(op, "channel", _channel_dims(op))[:1])


def _group_stat_dims(op: OpNode) -> tuple[str, ...]:
    """The dims of the statistics other than the groups: by default the first."""
    over = dims_of(op, "over", without(op.output[1:], (_channel(op),)))
    return without(op.output, (*over, _channel(op)))


def _check_group(op: OpNode) -> None:
    check_same(op)
    check_broadcast(op)
    channel, groups = _channel(op), integer_of(op, "groups", 1)
    if channel not in op.output:
        raise refuse(
            op,
            "needs a channel dim",
            key="output",
            found=dims_text(op.output),
            allowed="the dim that `channel` names; else the scale's first dim, else the second",
        )
    if op.dims[channel] % groups:
        raise refuse(
            op,
            "needs a channel dim of whole groups",
            key="attributes.groups",
            found=f"{groups} groups of dim {channel}",
            allowed="a divisor of the channels",
        )


def _group_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    channel, groups, rest = _channel(op), integer_of(op, "groups", 1), _group_stat_dims(op)
    per_channel = 2.0 * groups / op.dims[channel]
    call = CollectiveCall(
        collective="all_reduce", dims=(*rest, channel), copies=per_channel, element_bytes=STATISTIC_BYTES
    )
    across = CollectiveCall(
        collective="all_reduce", dims=rest, copies=2.0 * groups, element_bytes=STATISTIC_BYTES
    )
    spread = without(op.output, (*rest, channel))
    further = split_rule(op, channel, name=f"split {channel} across groups", collectives=(across,))
    return (
        *split_rules(op, rest),
        split_rule(op, channel, units=groups),
        *((further,) if groups < op.dims[channel] else ()),
        *(split_rule(op, dim, collectives=(call,)) for dim in spread),
    )


def _group_saved(op: OpNode) -> SavedTensors:
    channel = _channel(op)
    per_channel = STATISTIC_BYTES * integer_of(op, "groups", 1) / op.dims[channel]
    return SavedTensors(inputs=(0,), own=(((*_group_stat_dims(op), channel), per_channel),) * 2)


GROUP_NORM = OperatorKind(
    name="group_norm",
    summary="Mean and variance of each group of channels over all dims but the first.",
    operands="one input; at most a scale and a shift with dims of it",
    inputs=(1, 1),
    parameters=(0, 2),
    attributes=(
        Attribute(name="groups", type="integer", meaning="groups of channels", low=1, required=True),
        Attribute(name="channel", type="dim", meaning="the channels; default: the scale's dim or the second"),
        _OVER,
    ),
    check=_check_group,
    splits=_group_rules,
    work=_norm_work,
    saved=_group_saved,
)  # fmt: skip


def _softmax_over(op: OpNode) -> tuple[str, ...]:
    return dims_of(op, "over", op.output[-1:])


def _softmax_rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. A sharded distribution all-reduces its maximum and its sum, and the sum of its
    gradient."""
    rest = without(op.output, _softmax_over(op))
    call = CollectiveCall(
        collective="all_reduce", dims=rest, forward_calls=2, backward_calls=1, element_bytes=STATISTIC_BYTES
    )
    return (
        *split_rules(op, rest),
        *(split_rule(op, dim, collectives=(call,)) for dim in _softmax_over(op)),
    )


def _softmax_work(op: OpNode) -> tuple[KernelWork, ...]:
    return (KernelWork(kind="memory", moved=(Moved(op.inputs[0].dims), Moved(op.output, 1.0, 2.0))),)


def _softmax_saved(op: OpNode) -> SavedTensors:
    return SavedTensors(output=True)


SOFTMAX = OperatorKind(
    name="softmax",
    summary="A distribution over a dim, or its logarithm.",
    operands="one input",
    inputs=(1, 1),
    attributes=(
        Attribute(name="over", type="dims", meaning="the dims of each distribution; default: the last"),
        Attribute(
            name="function", type="text", meaning="default softmax", choices=("softmax", "log_softmax")
        ),
    ),
    check=_check_over(_softmax_over),
    splits=_softmax_rules,
    work=_softmax_work,
    saved=_softmax_saved,
)  # fmt: skip
