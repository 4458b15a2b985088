"""Fused scaled dot-product attention; each dim's role follows from the tensors that have it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.graph.kinds.kind import (
    Attribute,
    OperatorKind,
    dims_of,
    dims_text,
    integer_of,
    refuse,
    without,
)
from shardwise.graph.kinds.normalization import STATISTIC_BYTES
from shardwise.graph.record import KernelWork, OpNode, SavedTensors
from shardwise.graph.rules import (
    CollectiveCall,
    ShardingRule,
    operands_of,
    partial_rule,
    split_rule,
    split_rules,
)


@dataclass(frozen=True, slots=True)
class _Roles:
    """The roles of dims.

    `batch` is in all tensors (also heads, where keys have equally many). `heads` are in queries and output
    only, `kv_heads` in keys and values only. `width` is summed in the scores, `value_width` is that of
    values.
    """

    batch: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]
    width: tuple[str, ...]
    value_width: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """The dims of a statistic of scores: one value for each query and head."""
        return (*self.batch, *self.heads, *self.queries)


def _roles(op: OpNode) -> _Roles:
    queries, keys, values = (operand.dims for operand in op.inputs[:3])
    heads, kv_heads = dims_of(op, "heads", ()), dims_of(op, "kv_heads", ())
    ours = [dim for dim in queries if dim in op.output]
    theirs = [dim for dim in keys if dim in values]
    return _Roles(
        batch=tuple(dim for dim in ours if dim in theirs),
        queries=without(ours, (*theirs, *heads)),
        keys=without(theirs, (*ours, *kv_heads)),
        heads=without(heads, theirs),
        kv_heads=without(kv_heads, ours),
        width=tuple(dim for dim in queries if dim in keys and dim not in values),
        value_width=tuple(dim for dim in values if dim in op.output and dim not in keys),
    )


def _check(op: OpNode) -> None:
    roles = _roles(op)
    queries, keys, values = (operand.dims for operand in op.inputs[:3])
    known = {
        "inputs[0]": (queries, (*roles.rows, *roles.width)),
        "inputs[1]": (keys, (*roles.batch, *roles.kv_heads, *roles.keys, *roles.width)),
        "inputs[2]": (values, (*roles.batch, *roles.kv_heads, *roles.keys, *roles.value_width)),
        "output": (op.output, (*roles.rows, *roles.value_width)),
    }
    for key, (dims, expected) in known.items():
        if set(dims) != set(expected):
            raise refuse(
                op,
                "has a dim without a role",
                key=key,
                found=dims_text(without(dims, expected) or without(expected, dims)),
                allowed="queries [b, s, h, d], keys [b, t, h, d], values [b, t, h, e], output [b, s, h, e]; "
                "where keys have fewer heads, attributes `heads` and `kv_heads` name them",
            )
    for role in ("queries", "keys", "width", "value_width"):
        if len(getattr(roles, role)) != 1:
            raise refuse(
                op, f"needs one dim for {role.replace('_', ' ')}", found=dims_text(getattr(roles, role)),
                allowed="one of its own; more heads or groups of heads by attributes `heads`, `kv_heads`",
            )  # fmt: skip
    _check_heads(op, roles)
    for index, operand in enumerate(operands_of(op)[3:], 3):
        if lost := without(operand, (*roles.rows, *roles.keys)):
            raise refuse(
                op, "adds a tensor with other dims to its scores", key=f"inputs[{index}]",
                found=dims_text(lost), allowed=dims_text((*roles.rows, *roles.keys)),
            )  # fmt: skip


def _check_heads(op: OpNode, roles: _Roles) -> None:
    if roles.kv_heads and (
        len(roles.heads) != 1
        or len(roles.kv_heads) != 1
        or op.dims[roles.heads[0]] % op.dims[roles.kv_heads[0]]
    ):
        raise refuse(
            op,
            "needs whole groups of heads for each head of the keys",
            key="attributes.kv_heads",
            found=", ".join(f"{dim} = {op.dims[dim]}" for dim in (*roles.heads, *roles.kv_heads)),
            allowed="one dim of heads, a multiple of one dim of heads of the keys",
        )
    if op.attributes.get("causal") and op.dims[roles.queries[0]] != op.dims[roles.keys[0]]:
        raise refuse(
            op,
            "is causal and needs equally many queries and keys",
            key="attributes.causal",
            found=f"{op.dims[roles.queries[0]]} queries, {op.dims[roles.keys[0]]} keys",
            allowed="equal numbers",
        )


def _rules(op: OpNode) -> tuple[ShardingRule, ...]:
    """Sharding rules. With sharded keys, values become partial sums: ranks all-reduce the maximum and the
    sum of each row of scores first; the backward pass all-reduces the product of output and gradient of
    each row."""
    roles = _roles(op)
    statistics = CollectiveCall(
        collective="all_reduce", dims=roles.rows, forward_calls=2, element_bytes=STATISTIC_BYTES
    )
    grouped = (
        split_rule(op, roles.heads[0], also=roles.kv_heads, units=op.dims[roles.kv_heads[0]])
        if roles.kv_heads
        else None
    )
    heads_name = f"split {roles.heads[0]}, keys whole" if roles.kv_heads else None
    return (
        *split_rules(op, roles.batch),
        *((grouped,) if grouped else ()),
        *(split_rule(op, dim, name=heads_name) for dim in roles.heads),
        *split_rules(op, (*roles.queries, *roles.value_width)),
        *(split_rule(op, dim, collectives=(statistics,)) for dim in roles.keys),
        partial_rule(op, (2,)),
    )


def _work(op: OpNode) -> tuple[KernelWork, ...]:
    roles = _roles(op)
    return (
        KernelWork(
            kind="attention",
            batch=(*roles.batch, *roles.heads),
            m=roles.queries,
            n=roles.keys,
            k=roles.width,
            v=roles.value_width,
            causal=bool(op.attributes.get("causal", False)),
            window=integer_of(op, "window", 0) or None,
        ),
    )


def _saved(op: OpNode) -> SavedTensors:
    """Queries, keys, values, output, and the log-sum-exp of every row of scores (Dao 2023, arXiv
    2307.08691)."""
    roles = _roles(op)
    return SavedTensors(
        inputs=tuple(range(len(op.inputs))), output=True, own=((roles.rows, STATISTIC_BYTES),)
    )


ATTENTION = OperatorKind(
    name="attention",
    summary="Softmax of the products of queries and keys, times values; fused if the device has a kernel.",
    operands="queries [b, s, h, d], keys [b, t, h, d], values [b, t, h, e], then tensors added to the "
    "scores; the output is [b, s, h, e], in any order of dims",
    inputs=(3, 5),
    parameters=(0, 2),
    attributes=(
        Attribute(name="causal", type="flag", meaning="whether a query sees keys up to its position only"),
        Attribute(name="window", type="integer", meaning="the most keys that a query sees", low=1),
        Attribute(name="heads", type="dims", meaning="the dims of the heads, if keys have fewer or none"),
        Attribute(name="kv_heads", type="dims", meaning="the dims of the heads of keys and values, if fewer"),
    ),
    check=_check,
    splits=_rules,
    work=_work,
    saved=_saved,
)
