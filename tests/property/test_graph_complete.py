"""No sharding rule is missing: of all placements of all tensors along an axis of two ranks, those that are
correct without communication are those of the rules.

Every candidate is executed. At most two dims are divided together (no tensor has both), tensors with such a
dim are split along it, and every other tensor is replicated, replicated with a summed gradient, or a partial
sum. A tensor that a rule splits may also be replicated with a summed gradient, because cutting it costs
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from tests.property.op_instances import EVEN_INSTANCES
from tests.property.spmd import Array
from tests.property.test_graph_kinds import (
    Carried,
    carry_out,
    operands_of,
    placements_of,
    whole,
    without_gradient,
)

from shardwise.graph import (
    PARTIAL,
    REPLICATE,
    REPLICATE_SUM_GRAD,
    OpNode,
    Placement,
    ShardingRule,
    rules_of,
    shard,
)

RANKS = 2
UNSPLIT = (REPLICATE, REPLICATE_SUM_GRAD, PARTIAL)

Layout = tuple[Placement, ...]
"""Placements of inputs, parameters and output."""

ZEROS = "some groups alone, zeros elsewhere: the same work as splitting outputs by groups"
WHOLE_ROWS = "windows of a whole input: rules have parts of it instead, with rows of neighbours"
TWO_RANKS = "two ranks need no rows of each other, more do"

KNOWN_EXTRA = {
    "grouped convolution": ZEROS,
    "windowed attention of grouped heads": ZEROS,
    "rotary": "tables of angles as partial sums: they are given whole",
    "strided convolution": WHOLE_ROWS,
    "valid convolution": WHOLE_ROWS,
    "overlapping maxima": WHOLE_ROWS,
    "averages of windows": WHOLE_ROWS,
    "adaptive averages of unequal windows": TWO_RANKS,
}
"""Operators with correct layouts that are not among the rules, with the reason."""


def candidates(op: OpNode) -> Iterator[ShardingRule]:
    """Every layout with matching shapes, as a rule without collectives."""
    tensors = (*operands_of(op), op.output)
    even = [dim for dim, size in op.dims.items() if size % RANKS == 0]
    for divided in (*combinations(even, 0), *combinations(even, 1), *combinations(even, 2)):
        if any(set(divided) <= set(dims) for dims in tensors) and len(divided) > 1:
            continue
        choices = [
            [shard(at) for at, dim in enumerate(dims) if dim in divided] or UNSPLIT for dims in tensors
        ]
        for placements in product(*choices):
            inputs = len(op.inputs)
            yield ShardingRule(
                name=f"divided {divided}",
                split=None,
                inputs=placements[:inputs],
                parameters=placements[inputs:-1],
                output=placements[-1],
                units=RANKS,
            )


def layout_of(op: OpNode, rule: ShardingRule) -> Layout:
    """The placements of a rule; a tensor without gradient has no summed gradient."""
    placements = [*rule.inputs, *rule.parameters, rule.output]
    at = without_gradient(op)
    if at is not None and placements[at] == REPLICATE_SUM_GRAD:
        placements[at] = REPLICATE
    return tuple(placements)


def is_expected(op: OpNode, rule: ShardingRule, known: set[Layout]) -> bool:
    """Indices have no partial sums. A parameter is a partial sum only where some rule has it so: parameters
    are stored whole, and reading one as a partial sum would waste all ranks but one.
    """
    at = without_gradient(op)
    if at is not None and rule.inputs[at] == PARTIAL:
        return False
    first = len(op.inputs)
    return all(
        placement != PARTIAL or any(layout[place] == PARTIAL for layout in known)
        for place, placement in enumerate(rule.parameters, first)
    )


def known_layouts(op: OpNode) -> set[Layout]:
    return {layout_of(op, rule) for rule in rules_of(op) if not rule.collectives}


def right_layouts(op: OpNode) -> set[Layout]:
    """Layouts whose execution is correct. Layouts that differ only in how the gradient of a replicated tensor
    is summed are executed once: the sum matters only when the gradient is assembled.
    """
    known, expected = known_layouts(op), whole(op)
    right: set[Layout] = set()
    ran: dict[Layout, Carried | None] = {}
    for rule in candidates(op):
        if is_expected(op, rule, known):
            operands = [
                REPLICATE if each == REPLICATE_SUM_GRAD else each for each in (*rule.inputs, *rule.parameters)
            ]
            key = (*operands, rule.output)
            if key not in ran:
                ran[key] = carried_right(op, rule, expected[0])
            carried = ran[key]
            if carried is not None and has_right_gradients(carried, rule, expected[1]):
                right.add(layout_of(op, rule))
    return right


WRONG = (AssertionError, ValueError, IndexError)
"""Copies that differ, shapes that do not match, and rows or elements that a rank lacks."""


def carried_right(op: OpNode, rule: ShardingRule, expected: Array) -> Carried | None:
    """The result of the operator under `rule`, where its output is correct."""
    try:
        carried = carry_out(op, [rule], [RANKS])
        output = carried.output([rule.output])
    except WRONG:
        return None
    assert not carried.calls
    return carried if is_equal(output, expected) else None


def has_right_gradients(carried: Carried, rule: ShardingRule, expected: list[Array]) -> bool:
    try:
        gradients = carried.gradients(placements_of([rule]))
    except WRONG:
        return False
    return all(is_equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))


def is_equal(ours: Array, theirs: Array) -> bool:
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-7, atol=1e-7)


def unexplained(right: set[Layout], known: set[Layout]) -> set[Layout]:
    return right - {cut for layout in known for cut in cuttings(layout)}


@pytest.mark.parametrize("name", EVEN_INSTANCES)
def test_no_rule_is_missing(name: str) -> None:
    op = EVEN_INSTANCES[name]
    known, right = known_layouts(op), right_layouts(op)
    assert {layout for layout in known if is_even(op, layout)} <= right
    extra = unexplained(right, known)
    assert bool(extra) == (name in KNOWN_EXTRA), extra


@pytest.mark.parametrize("name", ["linear", "sum of three", "attention", "reshape to heads"])
def test_a_rule_left_out_is_missed(name: str) -> None:
    op = EVEN_INSTANCES[name]
    known, right = known_layouts(op), right_layouts(op)
    for layout in known:
        assert unexplained(right, known - {layout}) == {layout}


def cuttings(layout: Layout) -> Iterator[Layout]:
    """The layout, and variants in which some of the split operands are replicated."""
    choices = [(place, REPLICATE_SUM_GRAD) if place >= 0 else (place,) for place in layout[:-1]]
    for operands in product(*choices):
        yield (*operands, layout[-1])


def is_even(op: OpNode, layout: Layout) -> bool:
    tensors = (*operands_of(op), op.output)
    return all(
        place < 0 or op.dims[dims[place]] % RANKS == 0 for dims, place in zip(tensors, layout, strict=True)
    )
