"""Memory that redistributing a tensor takes at its peak: it equals the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from unittest.mock import patch

import pytest
import torch
from tests.runtime.memory_tracker import Host, Tracker, fake_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.cost.layouts.redistribute import (
    Integers,
    Placements,
    _steps_between,
    data_placements,
    redistribution_elements,
    shifted_axes,
)
from shardwise.graph import PARTIAL, REPLICATE, shard
from shardwise.runtime.graphs import redistribute
from shardwise.runtime.graphs.placements import (
    Box,
    MeshPlacements,
    ProcessMesh,
    box_of,
    extents,
    value_placements,
)
from shardwise.runtime.graphs.redistribute import redistribute_local_tensor


def allocated_elements(
    grid: ProcessMesh, shape: tuple[int, ...], start: MeshPlacements, end: MeshPlacements
) -> int:
    """Elements of this rank at the peak."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        local = torch.zeros(extents(box_of(shape, grid.counts, start, grid.here)))
        tracker = Tracker(Host())
        tracker.track_external(local)
        with tracker:
            result = redistribute_local_tensor(grid, local, shape, start, end)
        assert result.shape == extents(box_of(shape, grid.counts, end, grid.here))
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) // 4


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [*product([(4,), (2, 2)], [(16, 24), (1, 24), (8, 6, 4)]), ((4,), (7, 8)), ((4,), (10, 12))],
)
def test_allocated_elements_of_redistributions_are_as_predicted(
    ranks: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """All pairs of placements, on the first rank. Pairs whose shards shift are left out: their prediction is
    rough. So is a whole tensor that becomes a partial sum: the first rank keeps it, others make zeros."""
    form_table = data_placements(shape, ranks)
    forms = form_table.placements
    predicted = redistribution_elements(shape, ranks, forms[:, None], forms[None, :])
    pairs = 0
    with fake_ranks(0, prod(ranks)):
        grid = ProcessMesh(ranks)
        for (a, start), (b, end) in product(enumerate(form_table.named), repeat=2):
            if a != b and not shifts(forms[a], forms[b]) and not only_sums(start, end):
                found = allocated_elements(grid, shape, value_placements(start), value_placements(end))
                assert found == predicted[a, b], (start, end)
                pairs += 1
    assert pairs > 4


def shifts(start: Integers, end: Integers) -> bool:
    return any(shifted_axes(step.now, step.then).any() for step in _steps_between(start, end))


def only_sums(start: Placements, end: Placements) -> bool:
    return all(a == b or (a == REPLICATE and b == PARTIAL) for a, b in zip(start, end, strict=True))


def copies_all(
    step: redistribute._StepOnRank, local: Tensor, boxes: Sequence[Box | None], rows: list[Tensor]
) -> Tensor:
    return PUT(step, local, boxes, list(rows))


PUT = redistribute._StepOnRank._put


def test_mutants_that_copy_more_take_more() -> None:
    """All-gathered rows arrive in order; a mutant that does not see this copies them once more. A gathered
    tensor is freed when it is padded, unless the caller still refers to it."""
    shape = (16, 24)
    with fake_ranks(0, 4):
        line, square = ProcessMesh((4,)), ProcessMesh((2, 2))

        def gathered() -> int:
            return allocated_elements(
                line, shape, value_placements((shard(0),)), value_placements((REPLICATE,))
            )

        def padded() -> int:
            start, end = (shard(0), shard(1)), (PARTIAL, REPLICATE)
            return allocated_elements(square, shape, value_placements(start), value_placements(end))

        in_order, gone = gathered(), padded()
        with patch.object(redistribute, "_are_slabs", lambda boxes, whole: False):
            assert gathered() == in_order + 16 * 24
        with patch.object(redistribute._StepOnRank, "_put", copies_all):
            assert padded() == gone + 8 * 24
