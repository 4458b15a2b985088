"""Every kind of operator with each key emptied, shortened, lengthened or renamed: it is refused by name, or
accepted, and then it has rules, work and an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.property.op_instances import EVEN_INSTANCES, INSTANCES
from tests.unit.graph.operators import operator

from shardwise.cluster import load_cluster, tier_mesh
from shardwise.cost import Training, layout_chain
from shardwise.errors import ConfigError
from shardwise.graph import (
    Block,
    Operand,
    OpGraph,
    OpNode,
    Parameter,
    check_graph,
    check_op,
    rules_of,
    saved_of,
    work_of,
)
from shardwise.graph.kinds import KINDS, Attribute

Dims = tuple[str, ...]


def changed_dims(dims: Dims, known: Dims) -> Iterator[Dims]:
    """Other dims in place of `dims`: none, fewer, more, one renamed, another order, one twice."""
    yield ()
    yield known
    yield dims[::-1]
    yield dims + dims
    for at in range(len(dims)):
        yield dims[:at]
        yield dims[:at] + dims[at + 1 :]
        yield from ((*dims[:at], dim, *dims[at + 1 :]) for dim in known)
    for at in range(len(dims) + 1):
        yield from ((*dims[:at], dim, *dims[at:]) for dim in known)


def changed_tensors(op: OpNode) -> Iterator[OpNode]:
    """`op` with other inputs, parameters, output or whole dims."""
    known = tuple(op.dims)
    yield from (replace(op, output=dims) for dims in changed_dims(op.output, known))
    yield from (replace(op, whole=dims) for dims in changed_dims(op.whole, known))
    for listed in changed_list(tuple(operand.dims for operand in op.inputs), known):
        yield replace(op, inputs=tuple(Operand(f"x{at}", dims) for at, dims in enumerate(listed)))
    for listed in changed_list(tuple(parameter.dims for parameter in op.parameters), known):
        yield replace(op, parameters=tuple(Parameter(f"w{at}", dims) for at, dims in enumerate(listed)))


def changed_list(tensors: tuple[Dims, ...], known: Dims) -> Iterator[tuple[Dims, ...]]:
    """No tensors, far too many, fewer, one twice, another order, and other dims of each."""
    yield ()
    yield tensors * 70
    yield tensors[::-1]
    for at, tensor in enumerate(tensors):
        yield (*tensors[:at], *tensors[at + 1 :])
        yield (*tensors[:at], tensor, *tensors[at:])
        for dims in changed_dims(tensor, known):
            yield (*tensors[:at], dims, *tensors[at + 1 :])


def changed_values(op: OpNode) -> Iterator[OpNode]:
    """`op` with an attribute or a size that is absent, of another type, small or large."""
    for attribute in KINDS[op.kind].attributes:
        others = {name: value for name, value in op.attributes.items() if name != attribute.name}
        yield replace(op, attributes=others)
        for value in values_of(attribute, tuple(op.dims)):
            yield replace(op, attributes=others | {attribute.name: value})
    for dim in op.dims:
        yield from (replace(op, dims={**op.dims, dim: size}) for size in (0, 1, 2, 10**12))


def values_of(attribute: Attribute, known: Dims) -> list[int | float | bool | str]:
    pairs = [f"{one} {other}" for one in known for other in known]
    words = ["", "other", *attribute.choices, *known, *pairs, " ".join(known)]
    return [-1, 0, 1, 2, 3, 10**6, 0.5, True, False, *words]


def outcome(op: OpNode, *, price: bool) -> str:
    """`refused` or `accepted`; an accepted operator has rules, work and, where requested, an estimate."""
    refusal = refusal_of(op)
    if refusal is not None:
        assert "'op'" in refusal.message and refusal.allowed
        return "refused"
    rules_of(op), work_of(op), saved_of(op)
    if price:
        graph = graph_with(op)
        check_graph(graph)
        cluster = load_cluster("1x4xV100-32G")
        layout_chain(graph, cluster, Training(dtype="fp16"), tier_mesh(cluster, 4))
    return "accepted"


def refusal_of(op: OpNode) -> ConfigError | None:
    try:
        check_op(op)
    except ConfigError as error:
        return error
    return None


def graph_with(op: OpNode) -> OpGraph:
    """A graph of `op` and the sum of its output."""
    total = OpNode(
        name="total",
        kind="reduce",
        dims={dim: op.dims[dim] for dim in op.output},
        inputs=(Operand("op", op.output),),
        output=(),
        attributes={"function": "sum"},
    )
    operators = (op, total) if op.output else (op,)
    inputs = {operand.source: op.shape(operand.dims) for operand in op.inputs}
    return OpGraph(name="changed", inputs=inputs, blocks=(Block(name="all", operators=operators),), batch=1)


@pytest.mark.parametrize("name", INSTANCES)
def test_a_changed_operator_is_refused_by_name_or_accepted(name: str) -> None:
    op = INSTANCES[name]
    every = [*changed_tensors(op), *changed_values(op)]
    outcomes = [outcome(changed, price=False) for changed in every]
    assert {"refused", "accepted"} == set(outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_every_accepted_operator_has_a_cost(kind: str) -> None:
    """One operator of each kind."""
    op = next(each for each in EVEN_INSTANCES.values() if each.kind == kind)
    assert outcome(op, price=True) == "accepted"
    for changed in (*changed_tensors(op), *changed_values(op)):
        outcome(changed, price=True)


SIZES = {"b": 4, "k": 3, "n": 6, "h": 4, "g": 4, "r": 4}


@pytest.mark.parametrize(
    ("op", "message", "key"),
    [
        (operator("concat", "b k, b k ->", SIZES), "needs a dim along which its inputs follow", "output"),
        (operator("group_norm", "b -> b", SIZES, groups=2), "needs a channel dim", "output"),
        (
            operator("concat", "b k, b k -> b n", SIZES, over="n b"),
            "cannot have this value",
            "attributes.over",
        ),
        (
            operator("group_norm", "b n -> b n", SIZES, groups=2, channel="n b"),
            "cannot have this value",
            "attributes.channel",
        ),
        (
            operator("lstm", "b k n -> b k h", SIZES, parameters="g h n, g h r", time="k b"),
            "cannot have this value",
            "attributes.time",
        ),
    ],
)
def test_an_operator_kind_names_the_dim_that_it_needs(op: OpNode, message: str, key: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_op(op)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "read", [lambda op: op.output[0], lambda op: op.output[1:2][0], lambda op: op.output[-1]]
)
def test_a_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch, read: Callable[[OpNode], str]) -> None:
    """The mutant reads a dim of its output without a check that it exists."""

    def check(op: OpNode) -> None:
        if read(op) not in op.dims:
            raise ConfigError(f"{op.name!r}", allowed="a dim")

    monkeypatch.setattr(
        "shardwise.graph.operator.KINDS", {**KINDS, "concat": replace(KINDS["concat"], check=check)}
    )
    with pytest.raises(IndexError):
        list(map(refusal_of, changed_tensors(INSTANCES["concat"])))
