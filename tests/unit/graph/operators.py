"""Small operators for tests, written as text like einsum's."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.graph import Operand, OpNode, Parameter, ShardingRule, placement_text


def operator(
    kind: str,
    text: str,
    sizes: Mapping[str, int],
    *,
    parameters: str = "",
    whole: tuple[str, ...] = (),
    **attributes: int | float | bool | str,
) -> OpNode:
    """An operator from `b s k, k n -> b s n`: inputs, output; `parameters` are written like inputs."""
    left, right = text.split("->")
    inputs = tuple(tuple(part.split()) for part in left.split(","))
    weights = tuple(tuple(part.split()) for part in parameters.split(",")) if parameters else ()
    output = tuple(right.split())
    used = dict.fromkeys(dim for dims in (*inputs, *weights, output) for dim in dims)
    return OpNode(
        name="op",
        kind=kind,
        dims={dim: sizes[dim] for dim in used},
        inputs=tuple(Operand(f"x{at}", dims) for at, dims in enumerate(inputs)),
        parameters=tuple(Parameter(f"w{at}", dims) for at, dims in enumerate(weights)),
        output=output,
        attributes=attributes,
        whole=whole,
    )


def rule_text(rule: ShardingRule) -> str:
    """`split k: S(2) / S(0) -> P`: inputs, parameters, output."""
    inputs, parameters = (" ".join(map(placement_text, places)) for places in (rule.inputs, rule.parameters))
    operands = f"{inputs} / {parameters}" if parameters else inputs
    return f"{rule.name}: {operands} -> {placement_text(rule.output)}"
