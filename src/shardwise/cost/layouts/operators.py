"""Everything that one operator's layout decides by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.layouts.choices import OperatorLayouts
from shardwise.cost.layouts.exchanges import CollectiveTimes, collective_times
from shardwise.cost.layouts.forms import Integers, Values, local_elements, value_placements
from shardwise.cost.layouts.ground import CostContext
from shardwise.cost.layouts.work import Needs, Times, scores_of, times_of
from shardwise.cost.operators import UNFUSED_SCORE_BYTES
from shardwise.graph import SavedTensors, work_of


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCosts:
    """An operator's layouts with their times (K), bytes that it keeps of its own (K), of the data that it
    reads and of those that its backward pass reads (K), the largest it needs while it works (K), and the
    share of its inputs' conversions that hides beside it."""

    choices: OperatorLayouts
    needs: Needs
    saved: SavedTensors
    times: Times
    collective_times: CollectiveTimes
    saved_bytes: Values
    data_bytes: Values
    saved_data_bytes: Values
    working_bytes: Values
    overlap: tuple[float, float]

    def __len__(self) -> int:
        return len(self.choices)


def operator_costs(
    context: CostContext,
    choices: OperatorLayouts,
    needs: Needs,
    saved: SavedTensors,
    data_slots: tuple[int, ...],
) -> OperatorCosts:
    """All that the layouts of an operator cost alone; `data_slots` are inputs that are given to the graph."""
    op = choices.op
    works = work_of(op)
    moved = collective_times(context, choices)
    if not needs.any:
        moved = CollectiveTimes(moved.forward_s, np.zeros(len(choices)))
    profile = context.profile
    is_attention = any(work.kind == "attention" for work in works)
    forward_overlap = profile.context_overlap if is_attention else profile.tensor_overlap
    backward_overlap = forward_overlap + (0.0 if is_attention else profile.tensor_backward_overlap)
    return OperatorCosts(
        choices=choices,
        needs=needs,
        saved=saved,
        times=times_of(context, choices, needs),
        collective_times=moved,
        saved_bytes=_saved_bytes(context, choices, saved),
        data_bytes=_data_bytes(context, choices, data_slots),
        saved_data_bytes=_data_bytes(context, choices, [slot for slot in data_slots if slot in saved.inputs]),
        working_bytes=_working_bytes(context, choices, data_slots),
        overlap=(forward_overlap, backward_overlap),
    )


def tensor_bytes(context: CostContext, shape: tuple[int, ...], placements: Integers) -> Values:
    """Bytes of an activation that lies so, on the rank with most."""
    return local_elements(shape, context.ranks, value_placements(placements)) * context.activation_bytes


def _data_bytes(context: CostContext, choices: OperatorLayouts, slots: Sequence[int]) -> Values:
    """What these inputs take, which the graph is given: they lie as the operator reads them."""
    shapes = [choices.op.shape(choices.op.inputs[slot].dims) for slot in slots]
    return sum(
        (
            tensor_bytes(context, shape, choices.inputs[slot])
            for slot, shape in zip(slots, shapes, strict=True)
        ),
        np.zeros(len(choices)),
    )


def _saved_bytes(context: CostContext, choices: OperatorLayouts, saved: SavedTensors) -> Values:
    """Statistics, masks and unfused scores."""
    op = choices.op
    total: Any = np.zeros(len(choices))
    for dims, element_bytes in saved.own:
        total = total + choices.extent(dims) * (element_bytes or context.activation_bytes)
    if context.attention is None:
        for work in work_of(op):
            if work.kind == "attention":
                total = total + UNFUSED_SCORE_BYTES * scores_of(choices, work)
    return np.asarray(total)


def _working_bytes(context: CostContext, choices: OperatorLayouts, data_slots: tuple[int, ...]) -> Values:
    """The operator's result and inputs, or their gradients: as much."""
    op = choices.op
    total = tensor_bytes(context, op.shape(op.output), choices.output)
    for slot, operand in enumerate(op.inputs):
        if slot not in data_slots:
            total = total + tensor_bytes(context, op.shape(operand.dims), choices.inputs[slot])
    return total
