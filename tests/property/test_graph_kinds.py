"""Every sharding rule of every kind is executed: ranks with the rule's placements of inputs and output
gradient, and the rule's collectives, compute the rule's placements of the output and the input gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
import pytest
from tests.property.op_instances import INSTANCES
from tests.property.placements import GRADIENT, TENSOR, assemble, place
from tests.property.spmd import Array, Call, Mesh, Spmd, Value
from tests.property.window_programs import PROGRAMS

from shardwise.graph import (
    PARTIAL,
    REPLICATE,
    REPLICATE_SUM_GRAD,
    OpNode,
    Placement,
    ShardingRule,
    allows,
    check_op,
    local_sizes,
    rules_of,
)
from shardwise.graph.kinds import KINDS

TOLERANCE = 1e-7

INTEGERS = {"embedding": 0, "cross_entropy": 1}
"""The operand of a kind that is an index, without gradient; it is below the size of the dim of its table."""


def tensors_of(op: OpNode, seed: int) -> list[Array]:
    """Random inputs and parameters."""
    rng = np.random.default_rng(seed)
    tensors = operands_of(op)
    arrays = [rng.normal(size=op.shape(dims)) for dims in tensors]
    if op.kind in INTEGERS:
        at = INTEGERS[op.kind]
        (dim,) = set(tensors[1 - at]) - set(op.output) - set(tensors[at])
        arrays[at] = rng.integers(0, op.dims[dim], size=op.shape(tensors[at])).astype(float)
    return arrays


def without_gradient(op: OpNode) -> int | None:
    """The operand without a gradient: an index or a condition."""
    masks = {"where": 0, "masked_fill": 1}
    return masks.get(str(op.attributes.get("function")), INTEGERS.get(op.kind))


def operands_of(op: OpNode) -> list[tuple[str, ...]]:
    return [*(operand.dims for operand in op.inputs), *(parameter.dims for parameter in op.parameters)]


@dataclass(frozen=True)
class Carried:
    """Local shards after an operator and its backward pass, and the collectives that ran."""

    op: OpNode
    mesh: Mesh
    operands: list[Value]
    result: Value
    calls: list[Call]

    def output(self, placements: Sequence[Placement]) -> Array:
        """The whole output, assembled by the placements of each axis."""
        return assemble(self.mesh, self.result.parts, placements, partial=TENSOR)

    def gradients(self, placements: Sequence[Sequence[Placement]]) -> list[Array]:
        """Gradients of inputs and parameters, assembled by the placements of each and each axis."""
        return [
            assemble(self.mesh, operand.grad, placements[at], partial=GRADIENT)
            for at, operand in enumerate(self.operands)
            if INTEGERS.get(self.op.kind) != at
        ]


def carry_out(op: OpNode, rules: Sequence[ShardingRule], counts: Sequence[int], seed: int = 1) -> Carried:
    """Execute the operator on random operands, and its backward pass on a random output gradient, placed by
    `rules`.
    """
    mesh = Mesh(op, rules, tuple(counts))
    run = Spmd(mesh)
    operands: list[Value] = []
    for at, (dims, array) in enumerate(zip(operands_of(op), tensors_of(op, seed), strict=True)):
        parts = place(mesh, dims, array, placements_of(rules)[at], partial=TENSOR, seed=at)
        operands.append(run.value(dims, parts))
    result = PROGRAMS[op.kind](run, op, operands)
    outputs = [rule.output for rule in rules]
    gradient = np.random.default_rng(seed + 1).normal(size=op.shape(op.output))
    run.backward(result, place(mesh, op.output, gradient, outputs, partial=GRADIENT, seed=9))
    return Carried(op, mesh, operands, result, run.calls)


def placements_of(rules: Sequence[ShardingRule]) -> list[list[Placement]]:
    """Placements of each input and parameter along each axis."""
    return [list(each) for each in zip(*((*rule.inputs, *rule.parameters) for rule in rules), strict=True)]


def carried_out(
    op: OpNode, rules: Sequence[ShardingRule], counts: Sequence[int], seed: int = 1
) -> tuple[Array, list[Array], list[Call]]:
    """The output, the gradients of inputs and parameters for a random gradient of the output, and the
    collectives that ran."""
    carried = carry_out(op, rules, counts, seed)
    gradients = carried.gradients(placements_of(rules))
    return carried.output([rule.output for rule in rules]), gradients, carried.calls


def whole(op: OpNode) -> tuple[Array, list[Array]]:
    """The same on one rank."""
    replicate = rules_of(op)[0]
    output, gradients, _ = carried_out(op, [replicate], [1])
    return output, gradients


@cache
def whole_instance(name: str) -> tuple[Array, list[Array]]:
    return whole(INSTANCES[name])


def agree(name: str, rules: Sequence[ShardingRule], counts: Sequence[int]) -> bool:
    """Whether ranks under `rules` compute the same as one rank."""
    try:
        output, gradients, _ = carried_out(INSTANCES[name], rules, counts)
    except AssertionError:
        return False
    return is_whole(name, output, gradients)


def is_whole(name: str, output: Array, gradients: list[Array]) -> bool:
    expected, expected_gradients = whole_instance(name)
    pairs = [(output, expected), *zip(gradients, expected_gradients, strict=True)]
    return all(np.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE) for ours, theirs in pairs)


def ranks_for(op: OpNode, rule: ShardingRule) -> list[int]:
    return [count for count in (2, 3, 4) if allows(op, [rule], [count])]


def evenly(op: OpNode, rule: ShardingRule, count: int) -> bool:
    """Rows and windows are split equally only where both divide."""
    return rule.split is None or all(
        op.dims[dim] % count == 0
        for dim in (op.inputs[0].dims[-1], op.output[-1], *op.inputs[0].dims[2:], *op.output[2:])
    )


SPATIAL = ("convolution", "pool")


@pytest.mark.parametrize("name", INSTANCES)
def test_ranks_compute_the_results_of_a_single_rank(name: str) -> None:
    op = INSTANCES[name]
    check_op(op)
    for rule in rules_of(op):
        counts = [n for n in ranks_for(op, rule) if op.kind not in SPATIAL or evenly(op, rule, n)]
        assert counts or not ranks_for(op, rule) or op.kind in SPATIAL, rule.name
        for count in counts:
            assert agree(name, [rule], [count]), (rule.name, count)


def declared(op: OpNode, rule: ShardingRule, count: int) -> Counter[tuple[str, str, float]]:
    """Collectives of a rule: kind, direction, elements; and how many."""
    sizes = local_sizes(op, [rule], [count])
    calls: Counter[tuple[str, str, float]] = Counter()
    for call in rule.collectives:
        elements = round(prod(sizes[dim] for dim in call.dims) * call.copies, 6)
        calls[(call.collective, "forward", elements)] += call.forward_calls
        calls[(call.collective, "backward", elements)] += call.backward_calls
    return +calls


@pytest.mark.parametrize("name", INSTANCES)
def test_ranks_send_the_declared_bytes_of_the_rules(name: str) -> None:
    op = INSTANCES[name]
    for rule in rules_of(op):
        for count in ranks_for(op, rule)[:1]:
            if op.kind in SPATIAL and not evenly(op, rule, count):
                continue
            _, _, calls = carried_out(op, [rule], [count])
            ran = Counter((call.collective, call.direction, float(call.elements)) for call in calls)
            assert ran == declared(op, rule, count), rule.name


@pytest.mark.parametrize("name", INSTANCES)
def test_rules_go_together_along_two_axes(name: str, full: bool) -> None:
    """All allowed pairs on 2 x 2 ranks; without `--full`, each pair in one order only. Windows are split
    along one dim by one axis only here.
    """
    op = INSTANCES[name]
    rules = rules_of(op)
    for i, outer in enumerate(rules):
        for j, inner in enumerate(rules):
            if not full and (i + j + (i < j)) % 2:
                continue
            if op.kind in SPATIAL and outer.collectives and outer.split == inner.split:
                continue
            if op.kind in SPATIAL and not (evenly(op, outer, 4) and evenly(op, inner, 4)):
                continue
            if allows(op, [outer, inner], [2, 2]):
                assert agree(name, [outer, inner], [2, 2]), (outer.name, inner.name)


def test_every_operator_kind_is_executed() -> None:
    assert {op.kind for op in INSTANCES.values()} == set(KINDS) == set(PROGRAMS)


def holds(name: str, rule: ShardingRule, count: int) -> bool:
    """Whether a rule is correct for an instance: local shards and collectives."""
    op = INSTANCES[name]
    try:
        output, gradients, calls = carried_out(op, [rule], [count])
    except AssertionError:
        return False
    ran = Counter((call.collective, call.direction, float(call.elements)) for call in calls)
    return ran == declared(op, rule, count) and is_whole(name, output, gradients)


def swapped(
    op: OpNode, placements: tuple[Placement, ...], *, are_inputs: bool
) -> list[tuple[Placement, ...]]:
    """The same rule with a wrong placement of one tensor that is not split; a tensor without gradient has no
    wrong one.
    """
    without = without_gradient(op)
    return [
        (*placements[:at], SWAP[placement], *placements[at + 1 :])
        for at, placement in enumerate(placements)
        if placement in SWAP and not (are_inputs and at == without)
    ]


SWAP = {REPLICATE: REPLICATE_SUM_GRAD, REPLICATE_SUM_GRAD: REPLICATE, PARTIAL: REPLICATE}


def rule_mutants(op: OpNode, rule: ShardingRule) -> list[ShardingRule]:
    """The same rule with the placement of one tensor wrong, or with other exchanges.

    Halos are the most of any number of ranks: half of them may do for two, where rows and windows shift.
    """
    mutants = [replace(rule, output=SWAP[rule.output])] if rule.output in SWAP else []
    mutants += [replace(rule, inputs=inputs) for inputs in swapped(op, rule.inputs, are_inputs=True)]
    mutants += [
        replace(rule, parameters=parameters) for parameters in swapped(op, rule.parameters, are_inputs=False)
    ]
    for call in rule.collectives:
        calls = call.backward_calls + 1
        mutants += [
            replace(rule, collectives=()),
            replace(rule, collectives=(replace(call, backward_calls=calls),)),
        ]
        if call.collective != "neighbours" or op.dims[op.inputs[0].dims[-1]] % op.dims[op.output[-1]] == 0:
            mutants.append(replace(rule, collectives=(replace(call, copies=call.copies / 2),)))
    return mutants


@pytest.mark.parametrize("name", INSTANCES)
def test_broken_rules_are_caught(name: str) -> None:
    op = INSTANCES[name]
    for rule in rules_of(op):
        for count in ranks_for(op, rule)[-1:]:
            if op.kind in SPATIAL and not evenly(op, rule, count):
                continue
            for mutant in rule_mutants(op, rule):
                assert not holds(name, mutant, count), (rule.name, mutant)
