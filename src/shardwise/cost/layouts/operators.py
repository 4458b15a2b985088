"""Everything that one operator's layout decides by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.layouts.choices import Choices
from shardwise.cost.layouts.exchanges import Exchanged, exchanged
from shardwise.cost.layouts.forms import Integers, Values, local_elements, value_forms
from shardwise.cost.layouts.ground import Ground
from shardwise.cost.layouts.work import Needs, Times, scores_of, times_of
from shardwise.cost.operators import UNFUSED_SCORE_BYTES
from shardwise.graph import Kept, work_of


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """An operator's layouts with their times (K), bytes that it keeps of its own (K), of the data that it
    reads and of those that its backward pass reads (K), the largest it needs while it works (K), and the
    share of its inputs' conversions that hides beside it."""

    choices: Choices
    needs: Needs
    kept: Kept
    times: Times
    exchanged: Exchanged
    kept_bytes: Values
    data_bytes: Values
    kept_data_bytes: Values
    working_bytes: Values
    overlap: tuple[float, float]

    def __len__(self) -> int:
        return len(self.choices)


def priced(ground: Ground, choices: Choices, needs: Needs, kept: Kept, data_slots: tuple[int, ...]) -> Priced:
    """All that the layouts of an operator cost alone; `data_slots` are inputs that are given to the graph."""
    op = choices.op
    works = work_of(op)
    moved = exchanged(ground, choices)
    if not needs.any:
        moved = Exchanged(moved.forward_s, np.zeros(len(choices)))
    profile = ground.profile
    is_attention = any(work.kind == "attention" for work in works)
    forward_overlap = profile.context_overlap if is_attention else profile.tensor_overlap
    backward_overlap = forward_overlap + (0.0 if is_attention else profile.tensor_backward_overlap)
    return Priced(
        choices=choices,
        needs=needs,
        kept=kept,
        times=times_of(ground, choices, needs),
        exchanged=moved,
        kept_bytes=_kept_bytes(ground, choices, kept),
        data_bytes=_data_bytes(ground, choices, data_slots),
        kept_data_bytes=_data_bytes(ground, choices, [slot for slot in data_slots if slot in kept.inputs]),
        working_bytes=_working_bytes(ground, choices, data_slots),
        overlap=(forward_overlap, backward_overlap),
    )


def tensor_bytes(ground: Ground, shape: tuple[int, ...], placements: Integers) -> Values:
    """Bytes of an activation that lies so, on the rank with most."""
    return local_elements(shape, ground.ranks, value_forms(placements)) * ground.activation_bytes


def _data_bytes(ground: Ground, choices: Choices, slots: Sequence[int]) -> Values:
    """What these inputs take, which the graph is given: they lie as the operator reads them."""
    shapes = [choices.op.shape(choices.op.inputs[slot].dims) for slot in slots]
    return sum(
        (
            tensor_bytes(ground, shape, choices.inputs[slot])
            for slot, shape in zip(slots, shapes, strict=True)
        ),
        np.zeros(len(choices)),
    )


def _kept_bytes(ground: Ground, choices: Choices, kept: Kept) -> Values:
    """Statistics, masks and unfused scores."""
    op = choices.op
    total: Any = np.zeros(len(choices))
    for dims, element_bytes in kept.own:
        total = total + choices.extent(dims) * (element_bytes or ground.activation_bytes)
    if ground.attention is None:
        for work in work_of(op):
            if work.kind == "attention":
                total = total + UNFUSED_SCORE_BYTES * scores_of(choices, work)
    return np.asarray(total)


def _working_bytes(ground: Ground, choices: Choices, data_slots: tuple[int, ...]) -> Values:
    """The operator's result and inputs, or their gradients: as much."""
    op = choices.op
    total = tensor_bytes(ground, op.shape(op.output), choices.output)
    for slot, operand in enumerate(op.inputs):
        if slot not in data_slots:
            total = total + tensor_bytes(ground, op.shape(operand.dims), choices.inputs[slot])
    return total
