"""What it costs to bring an activation from how it lies to how it is read, for all pairs of choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.cost.layouts.columns import CostColumns
from shardwise.cost.layouts.forms import Integers, Values, gradient_placements, value_placements
from shardwise.cost.layouts.ground import CostContext
from shardwise.cost.layouts.operators import OperatorCosts


@dataclass(frozen=True, slots=True)
class Edge:
    """From placements A to placements B, (A, B) each: seconds forward and for the gradient, whether ranks
    hold `same` things in both; bytes at A (A, 1) and at B (1, B); `copies_bytes` are there meanwhile where
    they differ, of the tensor or of its gradient."""

    forward_s: Values
    backward_s: Values
    is_same: Values
    start_bytes: Values
    end_bytes: Values
    copies_bytes: Values


def edge_of(
    context: CostContext,
    shape: tuple[int, ...],
    start: Integers,
    end: Integers,
    *,
    needs_gradient: bool,
    value_bytes: float,
    gradient_bytes: float,
) -> Edge:
    """The edge from placements `start` (A, axes) to `end` (B, axes) of a tensor of `shape`, with so many
    bytes per element of it and of its gradient."""
    values = context.redistributions(shape, value_bytes)
    gradients = context.redistributions(shape, gradient_bytes)
    a, b = (values.table.find(value_placements(each)) for each in (start, end))
    da, db = (gradients.table.find(gradient_placements(each)) for each in (start, end))
    forward_s = values.seconds[a[:, None], b[None, :]]
    is_same = a[:, None] == b[None, :]
    start_bytes, end_bytes = values.nbytes[a][:, None], values.nbytes[b][None, :]
    copies = values.copies_bytes[a[:, None], b[None, :]]
    backward_s = np.zeros_like(forward_s)
    if needs_gradient:
        backward_s = gradients.seconds[db[None, :], da[:, None]]
        copies = np.maximum(copies, gradients.copies_bytes[db[None, :], da[:, None]])
    return Edge(forward_s, backward_s, is_same, start_bytes, end_bytes, copies)


def edge_costs(
    context: CostContext, edge: Edge, reader: OperatorCosts | None, *, is_repeated: bool
) -> CostColumns:
    """Costs of an edge, forward and back, and forward once more where that `is_repeated`; what its reader's
    software hides runs beside the reader's computation, each of its inputs beside an equal part."""
    columns = CostColumns(peak_bytes=edge.copies_bytes)
    if reader is None or reader.overlap == (0.0, 0.0):
        columns.forward(edge.forward_s)
        columns.blocked(edge.backward_s + (edge.forward_s if is_repeated else 0.0))
        return columns
    inputs = float(len(reader.choices.op.inputs))
    forward_s, backward_s = reader.times.forward_s[None] / inputs, reader.times.backward_s[None] / inputs
    there = context.exposed_and_hidden_s(edge.forward_s, forward_s, reader.overlap[0])
    columns.forward(there[0])
    columns.hidden_backward(*context.exposed_and_hidden_s(edge.backward_s, backward_s, reader.overlap[1]))
    if is_repeated:
        columns.hidden_backward(*there)
    return columns
