"""Rules that kinds are put together from: split a dim, repeat the work, work on a partial sum."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardwise.graph.placement import PARTIAL, REPLICATE, REPLICATE_SUM_GRAD, Placement, shard
from shardwise.graph.record import OpNode
from shardwise.graph.rule import CollectiveCall, ShardingRule


def operands_of(op: OpNode) -> tuple[tuple[str, ...], ...]:
    """Dims of all that an operator reads: its inputs, then its parameters."""
    return (*(operand.dims for operand in op.inputs), *(parameter.dims for parameter in op.parameters))


def split_rule(
    op: OpNode,
    split: str,
    *,
    name: str | None = None,
    also: Collection[str] = (),
    added: Collection[int] = (),
    output: Placement | None = None,
    units: int | None = None,
    collectives: tuple[CollectiveCall, ...] = (),
) -> ShardingRule:
    """Divide the iterations along `split` among the ranks, in at most `units` parts (its elements).

    Tensors that have it, or one of the dims `also` that follow it, are split. What has none of them is read
    whole by every rank for its own part of the work, so that its gradient is a partial sum. An output without
    them is a partial sum; then the operands `added` to it (biases) count as partial sums too. Where
    `collectives` make the output `REPLICATE`, every rank has whole gradients of all that is not split.
    """
    divided = (split, *also)
    result = _split_placement(op.output, divided) if output is None else output
    if result is None:
        result = PARTIAL
    elsewhere = REPLICATE if result == REPLICATE else REPLICATE_SUM_GRAD

    def placement(index: int, dims: tuple[str, ...]) -> Placement:
        if result == PARTIAL and index in added:
            return PARTIAL
        at = _split_placement(dims, divided)
        return elsewhere if at is None else at

    return _rule(
        op,
        name or f"split {split}",
        split,
        tuple(placement(index, dims) for index, dims in enumerate(operands_of(op))),
        result,
        units=op.dims[split] if units is None else units,
        collectives=collectives,
    )


def split_rules(op: OpNode, dims: Iterable[str], *, added: Collection[int] = ()) -> tuple[ShardingRule, ...]:
    """`split_rule` of each of `dims`, without exchanges."""
    return tuple(split_rule(op, dim, added=added) for dim in dims)


def partial_rule(op: OpNode, operands: Collection[int], *, added: Collection[int] = ()) -> ShardingRule:
    """Work on partial sums of `operands`, in which together the operator is linear: what is `added` to the
    product is one too, all else is whole, with gradients that are partial sums."""
    first = min(operands)
    every = set(range(len(op.inputs))) <= set(operands)
    return _rule(
        op,
        "partial" if every else f"partial {first}",
        None,
        tuple(
            PARTIAL if index in operands or index in added else REPLICATE_SUM_GRAD
            for index in range(len(operands_of(op)))
        ),
        PARTIAL,
    )


def replicated_rules(op: OpNode) -> tuple[ShardingRule, ShardingRule]:
    """Every rank does all of the work, on a whole gradient or, as backward passes are linear, on a partial
    sum of it."""
    count = len(operands_of(op))
    return (
        _rule(op, "replicate", None, (REPLICATE,) * count, REPLICATE),
        _rule(op, "replicate, gradients summed", None, (REPLICATE_SUM_GRAD,) * count, REPLICATE_SUM_GRAD),
    )


def product_rules(
    op: OpNode, *, linear: Iterable[Collection[int]], added: Collection[int] = ()
) -> tuple[ShardingRule, ...]:
    """Rules of a sum of products: every dim may be split, those that are summed over give partial sums; it is
    linear in each group of operands of `linear`."""
    dims = dict.fromkeys((*op.output, *(dim for operand in operands_of(op) for dim in operand)))
    return (
        *split_rules(op, dims, added=added),
        *(partial_rule(op, group, added=added) for group in linear),
    )


def _split_placement(dims: tuple[str, ...], divided: Collection[str]) -> Placement | None:
    return next((shard(at) for at, dim in enumerate(dims) if dim in divided), None)


def _rule(
    op: OpNode,
    name: str,
    split: str | None,
    operands: tuple[Placement, ...],
    output: Placement,
    *,
    units: int = 1,
    collectives: tuple[CollectiveCall, ...] = (),
) -> ShardingRule:
    inputs = len(op.inputs)
    return ShardingRule(
        name=name,
        split=split,
        inputs=operands[:inputs],
        parameters=operands[inputs:],
        output=output,
        units=units,
        collectives=collectives,
    )
