"""Sharding rules: how an operator and its tensors are placed along one axis of a device mesh.

A placement says what each rank along the axis has of a tensor and of its gradient. Four suffice, because the
backward pass of every operator is linear in the gradient:

| placement | tensor | gradient |
|---|---|---|
| `shard(i)` | split along its dim i | split along dim i |
| `REPLICATE` | whole on every rank | whole on every rank |
| `REPLICATE_SUM_GRAD` | whole on every rank | a partial sum on every rank |
| `PARTIAL` | a partial sum on every rank | whole on every rank |

They are DTensor's Shard, Replicate and Partial, with the gradient's placement made explicit. Kinds build
their `ShardingRule`s with `split_rule`, `partial_rule` and `product_rules`. `allows` and `local_sizes`
combine the rules of several mesh axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NewType

from shardwise.graph.record import OpNode

# Placements

Placement = NewType("Placement", int)
"""`shard(i)` is i; the others are negative, so placements sort and can index columns."""

REPLICATE = Placement(-1)
REPLICATE_SUM_GRAD = Placement(-2)
PARTIAL = Placement(-3)

REPLICATE_SHARD_STATES = Placement(-4)
"""Replicated with sharded optimizer states (ZeRO-1); for stored parameters only."""


def shard(dim: int) -> Placement:
    """Split along dim `dim` of the tensor; 0 is the outermost."""
    return Placement(dim)


def placements_of(dims: int) -> tuple[Placement, ...]:
    """All placements along one mesh axis of a tensor with `dims` dims."""
    return (*(shard(dim) for dim in range(dims)), REPLICATE, REPLICATE_SUM_GRAD, PARTIAL)


def placement_text(placement: Placement) -> str:
    """`S(1)`, `R`, `R+` (gradient summed), `P`, or `R°` (optimizer states sharded)."""
    return {REPLICATE: "R", REPLICATE_SUM_GRAD: "R+", PARTIAL: "P", REPLICATE_SHARD_STATES: "R°"}.get(
        placement, f"S({placement})"
    )


# Rules

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "neighbours"]
"""`all_reduce`, `all_gather` and `reduce_scatter` as in torch.distributed. `neighbours`: every rank sends the
tensor to the previous and to the next rank (halo exchange)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective inside an operator, among the ranks of its rule's axis.

    The tensor has `copies` elements for each element of `dims` on a rank. Dims that the rule divides are not
    among `dims`, so the result of an all-gather counts in full. The collective runs `forward_calls` times in
    the forward pass and `backward_calls` times in the backward pass. `element_bytes` is None for the dtype of
    the activations.
    """

    collective: Collective
    dims: tuple[str, ...]
    copies: float = 1.0
    forward_calls: int = 1
    backward_calls: int = 1
    element_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """One way to shard an operator along one mesh axis.

    `split` is the dim whose iterations are divided among the ranks, into at most `units` contiguous parts;
    None where every rank does all of them. There is one placement for each input, each parameter, and the
    output. `collectives` run inside the operator.
    """

    name: str
    split: str | None
    inputs: tuple[Placement, ...]
    parameters: tuple[Placement, ...]
    output: Placement
    units: int = 1
    collectives: tuple[CollectiveCall, ...] = ()


# Building rules


def operands_of(op: OpNode) -> tuple[tuple[str, ...], ...]:
    """Dims of all operands: inputs, then parameters."""
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
    """A rule that divides the iterations along `split` into at most `units` parts (default: its elements).

    Tensors that have `split`, or one of the dims `also` that follow it, are sharded. Other operands are read
    whole by every rank for its part of the work: their gradients are partial sums. An output without these
    dims is a partial sum; then the operands `added` to it (biases) count as partial sums too. Where
    `collectives` make the output `REPLICATE`, every rank has whole gradients of all operands that are not
    sharded.
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
    """`split_rule` for each of `dims`, without collectives."""
    return tuple(split_rule(op, dim, added=added) for dim in dims)


def partial_rule(op: OpNode, operands: Collection[int], *, added: Collection[int] = ()) -> ShardingRule:
    """A rule that works on partial sums of `operands`, in which the operator is jointly linear.

    Operands `added` to the product are partial sums too. All others are whole, with partial sums as
    gradients.
    """
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
    """Replication: every rank does all of the work, on a whole gradient or on a partial sum of it (as
    backward passes are linear)."""
    count = len(operands_of(op))
    return (
        _rule(op, "replicate", None, (REPLICATE,) * count, REPLICATE),
        _rule(op, "replicate, gradients summed", None, (REPLICATE_SUM_GRAD,) * count, REPLICATE_SUM_GRAD),
    )


def product_rules(
    op: OpNode, *, linear: Iterable[Collection[int]], added: Collection[int] = ()
) -> tuple[ShardingRule, ...]:
    """Rules of a sum of products, which is linear in each group of operands of `linear`.

    Every dim may be split; splitting a summed dim gives partial sums.
    """
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


# Rules of several axes


def divided_dims(op: OpNode, rule: ShardingRule) -> frozenset[str]:
    """The dims that a rule divides: its `split`, and dims of tensors that follow it."""
    tensors = (*operands_of(op), op.output)
    placements = (*rule.inputs, *rule.parameters, rule.output)
    followers = (dims[place] for dims, place in zip(tensors, placements, strict=True) if place >= 0)
    return frozenset(followers) | (frozenset() if rule.split is None else {rule.split})


def allows(op: OpNode, rules: Sequence[ShardingRule], ranks: Sequence[int]) -> bool:
    """Whether `rules`, one per mesh axis of `ranks` ranks, outermost first, are allowed together.

    No dim is divided into more parts than it has elements, nor by a rule into more than its units (heads,
    groups). Each rank has all halo rows that its neighbour needs. Where two rules divide one dim in units of
    unequal size, the outer axis has the larger units.
    """
    divided = [divided_dims(op, rule) for rule in rules]
    parts = _parts(op, divided, ranks)
    return (
        all(count <= op.dims[dim] for dim, count in parts.items())
        and all(_within_units(rule, rules, ranks) for rule in rules)
        and all(
            _has_neighbours_rows(op, rule, dims, parts) for rule, dims in zip(rules, divided, strict=True)
        )
        and all(
            outer.units <= inner.units
            for at, outer in enumerate(rules)
            for step, inner in enumerate(rules[at + 1 :], at + 1)
            if divided[at] & divided[step]
        )
    )


def local_sizes(op: OpNode, rules: Sequence[ShardingRule], ranks: Sequence[int]) -> dict[str, int]:
    """Elements of every dim on the rank that has most, under rules that are allowed together.

    A dim is divided into whole units as evenly as possible: of 7 elements on 2 ranks, one has 4.
    """
    divided = [divided_dims(op, rule) for rule in rules]
    parts = _parts(op, divided, ranks)
    sizes = dict(op.dims)
    for dim, count in parts.items():
        units = max(
            rule.units for rule, dims in zip(rules, divided, strict=True) if dim in dims and rule.split
        )
        unit = op.dims[dim] // units if op.dims[dim] % units == 0 else 1
        sizes[dim] = -(-(op.dims[dim] // unit) // count) * unit
    return sizes


def _parts(op: OpNode, divided: Sequence[frozenset[str]], ranks: Sequence[int]) -> dict[str, int]:
    """The number of parts of each divided dim."""
    return {
        dim: prod(count for dims, count in zip(divided, ranks, strict=True) if dim in dims)
        for dim in op.dims
        if any(dim in dims for dims in divided)
    }


def _within_units(rule: ShardingRule, rules: Sequence[ShardingRule], ranks: Sequence[int]) -> bool:
    along = prod(count for other, count in zip(rules, ranks, strict=True) if other.name == rule.name)
    return rule.split is None or along <= rule.units


def _has_neighbours_rows(
    op: OpNode, rule: ShardingRule, divided: frozenset[str], parts: Mapping[str, int]
) -> bool:
    rows = max((e.copies for e in rule.collectives if e.collective == "neighbours"), default=0.0)
    if rows == 0.0:
        return True
    return all(op.dims[dim] // parts[dim] >= rows for dim in op.inputs[0].dims if dim in divided)
