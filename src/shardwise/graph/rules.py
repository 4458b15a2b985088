"""How a tensor lies along one axis of a device mesh, forward and backward together.

A placement says two things at once: what each of the n ranks along the axis holds of the tensor, and what it
holds of the tensor's gradient. Four are enough, because the backward pass of every operator is linear in the
gradient:

| placement | tensor | gradient |
|---|---|---|
| `shard(i)` | split along its dim i | split along dim i |
| `REPLICATE` | whole on every rank | whole on every rank |
| `REPLICATE_SUM_GRAD` | whole on every rank | a partial sum on every rank |
| `PARTIAL` | a partial sum on every rank | whole on every rank |

(DTensor's Shard, Replicate and Partial, with the gradient's placement made explicit.)

One way to lay an operator along one mesh axis, and what its ranks then tell each other.

Rules that kinds are put together from: split a dim, repeat the work, work on a partial sum.

Rules of one operator along several mesh axes: whether they go together, and what each rank has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NewType

from shardwise.graph.record import OpNode

Placement = NewType("Placement", int)
"""`shard(i)` is i; the others are negative, so that placements sort and index columns."""

REPLICATE = Placement(-1)
REPLICATE_SUM_GRAD = Placement(-2)
PARTIAL = Placement(-3)

REPLICATE_SHARD_STATES = Placement(-4)
"""How a parameter alone may be stored: whole, with its optimizer states split."""


def shard(dim: int) -> Placement:
    """Split along dim `dim` of the tensor, 0 the outermost."""
    return Placement(dim)


def placements_of(dims: int) -> tuple[Placement, ...]:
    """All placements of a tensor of so many dims along one mesh axis."""
    return (*(shard(dim) for dim in range(dims)), REPLICATE, REPLICATE_SUM_GRAD, PARTIAL)


def placement_text(placement: Placement) -> str:
    """`S(1)`, `R`, `R+` (gradient summed), `P`, or `R°` (states split)."""
    return {REPLICATE: "R", REPLICATE_SUM_GRAD: "R+", PARTIAL: "P", REPLICATE_SHARD_STATES: "R°"}.get(
        placement, f"S({placement})"
    )


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "neighbours"]
"""`all_reduce`: every rank gives and gets the whole tensor. `all_gather`: every rank gives its part and gets
the whole tensor. `reduce_scatter`: every rank gives the whole tensor and gets its part of the sum.
`neighbours`: every rank gives the tensor to the rank before it and to the one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """Communication inside an operator, among the ranks of the axis that its rule lays.

    The tensor exchanged has `copies` elements for each element of `dims` on a rank; dims that the rule
    divides are not among them, so that what an all-gather puts together counts in full. It is exchanged
    `forward_calls` times in the forward pass and `backward_calls` times in the backward pass.
    `element_bytes` is None for a tensor in the type of the activations.
    """

    collective: Collective
    dims: tuple[str, ...]
    copies: float = 1.0
    forward_calls: int = 1
    backward_calls: int = 1
    element_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """One way to lay an operator along one mesh axis of n ranks.

    `split` is the dim whose iterations are divided among the ranks, in at most `units` contiguous parts; None
    where every rank does all of them. One placement for each input, each parameter, and the output.
    `collectives` are what the ranks tell each other inside the operator.
    """

    name: str
    split: str | None
    inputs: tuple[Placement, ...]
    parameters: tuple[Placement, ...]
    output: Placement
    units: int = 1
    collectives: tuple[CollectiveCall, ...] = ()


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
