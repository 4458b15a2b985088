"""What is there while a tensor is brought from how it lies to how it is read: what is charged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from unittest.mock import patch

import pytest
import torch
from tests.runtime.tracked import Host, Tracker, fake_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.cost.layouts.conversions import _steps_between, moved_elements, shifted_axes
from shardwise.cost.layouts.forms import Integers, Placements, held_forms
from shardwise.graph import PARTIAL, WHOLE, shard
from shardwise.runtime.graphs import bring
from shardwise.runtime.graphs.bring import moved
from shardwise.runtime.graphs.forms import Box, Form, box_of, extents, value_form
from shardwise.runtime.graphs.grid import Grid


def allocated_elements(grid: Grid, shape: tuple[int, ...], start: Form, end: Form) -> int:
    """Elements of this rank at the peak."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        local = torch.zeros(extents(box_of(shape, grid.counts, start, grid.here)))
        tracker = Tracker(Host())
        tracker.track_external(local)
        with tracker:
            result = moved(grid, local, shape, start, end)
        assert result.shape == extents(box_of(shape, grid.counts, end, grid.here))
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) // 4


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [*product([(4,), (2, 2)], [(16, 24), (1, 24), (8, 6, 4)]), ((4,), (7, 8)), ((4,), (10, 12))],
)
def test_what_is_there_is_what_is_charged(ranks: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """All pairs of ways to lie, on the first rank, but those between which parts shift, which are charged
    roughly. Of the whole that becomes a partial sum the first rank's is itself, and others make zeros."""
    held = held_forms(shape, ranks)
    forms = held.placements
    charged = moved_elements(shape, ranks, forms[:, None], forms[None, :])
    pairs = 0
    with fake_ranks(0, prod(ranks)):
        grid = Grid(ranks)
        for (a, start), (b, end) in product(enumerate(held.named), repeat=2):
            if a != b and not shifts(forms[a], forms[b]) and not only_sums(start, end):
                found = allocated_elements(grid, shape, value_form(start), value_form(end))
                assert found == charged[a, b], (start, end)
                pairs += 1
    assert pairs > 4


def shifts(start: Integers, end: Integers) -> bool:
    return any(shifted_axes(step.now, step.then).any() for step in _steps_between(start, end))


def only_sums(start: Placements, end: Placements) -> bool:
    return all(a == b or (a == WHOLE and b == PARTIAL) for a, b in zip(start, end, strict=True))


def all_kept(step: bring._Step, local: Tensor, boxes: Sequence[Box | None], rows: list[Tensor]) -> Tensor:
    return PUT(step, local, boxes, list(rows))


PUT = bring._Step._put


def test_twins_that_copy_or_keep_more_take_more() -> None:
    """Rows come in order, and are there once more where nobody sees that. What was gathered is gone when it
    is padded, unless whoever handed it over still has it."""
    shape = (16, 24)
    with fake_ranks(0, 4):
        line, square = Grid((4,)), Grid((2, 2))

        def gathered() -> int:
            return allocated_elements(line, shape, value_form((shard(0),)), value_form((WHOLE,)))

        def padded() -> int:
            start, end = (shard(0), shard(1)), (PARTIAL, WHOLE)
            return allocated_elements(square, shape, value_form(start), value_form(end))

        in_order, gone = gathered(), padded()
        with patch.object(bring, "_are_slabs", lambda boxes, whole: False):
            assert gathered() == in_order + 16 * 24
        with patch.object(bring._Step, "_put", all_kept):
            assert padded() == gone + 8 * 24
