"""Rules of one operator along several mesh axes: whether they go together, and what each rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from shardwise.graph.dividing import operands_of
from shardwise.graph.record import OpNode
from shardwise.graph.rule import ShardingRule


def divided_dims(op: OpNode, rule: ShardingRule) -> frozenset[str]:
    """The dims of an operator that a rule divides: the one it splits, and those of tensors that follow it."""
    tensors = (*operands_of(op), op.output)
    placements = (*rule.inputs, *rule.parameters, rule.output)
    followers = (dims[place] for dims, place in zip(tensors, placements, strict=True) if place >= 0)
    return frozenset(followers) | (frozenset() if rule.split is None else {rule.split})


def allows(op: OpNode, rules: Sequence[ShardingRule], ranks: Sequence[int]) -> bool:
    """Whether `rules`, one per mesh axis of so many ranks, the outermost first, go together.

    No dim is divided into more parts than it has elements, nor by a rule into more than its units (heads,
    groups); a rank has all the rows that its neighbour needs; and where two rules divide one dim in units of
    unequal size, the larger units are those of the outer axis.
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
    """Elements of every dim of the operator on the rank that has most, under rules that go together.

    A dim is divided into whole units as evenly as they go: of 7 elements on 2 ranks one has 4.
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
    """Into how many parts each dim that is divided at all is divided."""
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
