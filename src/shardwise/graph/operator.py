"""What the kind of an operator defines: checks, sharding rules, work and saved tensors; counts for a graph.

`rules_of`, `work_of`, `saved_of` and `check_op` are about one operator. `parameter_count`, `forward_flop` and
`step_flop` count a whole graph.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite, prod

from shardwise.graph.kinds import KINDS, Attribute, OperatorKind
from shardwise.graph.kinds.kind import dims_text, refuse
from shardwise.graph.record import KernelWork, OpGraph, OpNode, SavedTensors
from shardwise.graph.rules import ShardingRule, divided_dims, operands_of, replicated_rules
from shardwise.inputs import short_repr, unknown

# Operators


def rules_of(op: OpNode) -> tuple[ShardingRule, ...]:
    """Every sharding rule of `op` along one mesh axis of two or more ranks; `allows` checks combinations.

    Dims that the operator keeps `whole` and dims that cannot be divided are not split.
    """
    rules = (*replicated_rules(op), *KINDS[op.kind].splits(op))
    return tuple(
        rule
        for rule in rules
        if rule.split is None or (rule.units > 1 and divided_dims(op, rule).isdisjoint(op.whole))
    )


def work_of(op: OpNode) -> tuple[KernelWork, ...]:
    """The work of `op`, kernel by kernel; empty where it only changes the view of its input."""
    return KINDS[op.kind].work(op)


def saved_of(op: OpNode) -> SavedTensors:
    """The tensors that the backward pass of `op` reads again."""
    return KINDS[op.kind].saved(op)


def check_op(op: OpNode) -> None:
    """ConfigError with the operator's name, at its key, where its kind does not allow its tensors or
    attributes."""
    kind = KINDS.get(op.kind)
    if kind is None:
        message = f"of operator {short_repr(op.name)} is not an operator kind"
        raise unknown(message, op.kind, KINDS, key="kind")
    _check_tensors(op)
    _check_counts(op, kind)
    _check_attributes(op, kind)
    kind.check(op)


def _check_tensors(op: OpNode) -> None:
    for dims in (*operands_of(op), op.output, op.whole):
        for dim in dims:
            if dim not in op.dims:
                raise refuse(op, "names a dim without a size", found=dim, allowed=dims_text(tuple(op.dims)))
        if len(set(dims)) != len(dims):
            raise refuse(op, "has a dim twice in one tensor", found=dims_text(dims), allowed="each dim once")
    for dim, size in op.dims.items():
        if size < 1:
            raise refuse(
                op, "has a dim without elements", key=f"dims.{dim}", found=str(size), allowed="1 or more"
            )


def _check_counts(op: OpNode, kind: OperatorKind) -> None:
    for word, found, (least, most) in (
        ("inputs", len(op.inputs), kind.inputs),
        ("parameters", len(op.parameters), kind.parameters),
    ):
        if not least <= found <= most:
            allowed = str(least) if least == most else f"{least} to {most}"
            raise refuse(
                op,
                f"has a wrong number of {word}",
                key=word,
                found=str(found),
                allowed=f"{allowed} ({kind.operands})",
            )


def _check_attributes(op: OpNode, kind: OperatorKind) -> None:
    known = {attribute.name: attribute for attribute in kind.attributes}
    for name, value in op.attributes.items():
        key = f"attributes.{name}"
        if name not in known:
            message = f"{op.kind} operator {short_repr(op.name)} has no such attribute"
            raise unknown(message, name, known, key=key, found=short_repr(value))
        allowed = _wrong_value(op, known[name], value)
        if allowed:
            raise refuse(op, "cannot have this value", key=key, found=short_repr(value), allowed=allowed)
    for attribute in kind.attributes:
        if attribute.required and attribute.name not in op.attributes:
            allowed = ", ".join(attribute.choices) or attribute.meaning
            raise refuse(
                op, "needs this attribute", key=f"attributes.{attribute.name}", found="none", allowed=allowed
            )


def _wrong_value(op: OpNode, attribute: Attribute, value: object) -> str:
    """The allowed values of an attribute if `value` is not one; otherwise empty."""
    if attribute.type == "flag":
        fits, allowed = isinstance(value, bool), "true or false"
    elif attribute.type == "integer":
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= attribute.low
        allowed = f"a whole number from {attribute.low}"
    elif attribute.type == "number":
        fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        allowed = "a finite number"
    elif attribute.type == "text":
        fits, allowed = value in attribute.choices, ", ".join(attribute.choices)
    elif attribute.type == "dim":
        fits = isinstance(value, str) and value in op.dims
        allowed = f"the name of one dim of {dims_text(tuple(op.dims))}"
    else:
        fits = isinstance(value, str) and bool(value.split()) and set(value.split()) <= set(op.dims)
        allowed = f"names of dims of {dims_text(tuple(op.dims))}, separated by spaces"
    return "" if fits else allowed


# Counts of a graph


def parameter_count(graph: OpGraph) -> int:
    """Trained elements: a shared parameter counts once, one in a repeated block once per repetition."""
    counts = {
        parameter.name: node.elements(parameter.dims) * block.repeat
        for block in graph.blocks
        for node in block.operators
        for parameter in node.parameters
    }
    return sum(counts.values())


def forward_flop(graph: OpGraph) -> float:
    """flop of matmuls and attention in a forward pass of the whole batch; a multiply-add counts as two.

    Causal attention counts half. An operator's own `flop` replaces its count.
    """
    return sum(block.repeat * sum(map(_forward, block.operators)) for block in graph.blocks)


def step_flop(graph: OpGraph) -> float:
    """flop of a forward and backward pass.

    The backward pass repeats the forward pass once for each operand with a gradient, which graph inputs do
    not have.
    """
    return sum(
        block.repeat * sum(_forward(node) * (1 + _gradients(node, graph.inputs)) for node in block.operators)
        for block in graph.blocks
    )


def _forward(node: OpNode) -> float:
    return sum(_flop(node, work) for work in work_of(node)) if node.flop is None else node.flop


def _flop(node: OpNode, work: KernelWork) -> float:
    """flop of one kernel, for all steps of its serial dims."""
    batch, m, n, k, v, steps = (
        prod(node.shape(dims)) for dims in (work.batch, work.m, work.n, work.k, work.v, work.serial)
    )
    if work.kind == "matmul":
        return 2.0 * steps * batch * m * n * k
    if work.kind == "attention":
        keys = n / 2 if work.causal else n
        return 2.0 * batch * m * min(keys, work.window or keys) * (k + v)
    return 0.0


def _gradients(node: OpNode, data: Collection[str]) -> int:
    """How many of the two operands of a product have gradients; parameters other than the weight are added to
    it."""
    inputs = sum(operand.source not in data for operand in node.inputs)
    return min(1, inputs) + 1 if node.parameters else min(2, inputs)
