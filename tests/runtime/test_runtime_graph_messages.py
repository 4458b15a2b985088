"""All ranks batch the same collectives into one message, whatever the sizes of their shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from shardwise.graph import PARTIAL, REPLICATE, Placement, shard
from shardwise.runtime.graphs import redistribute
from shardwise.runtime.graphs.placements import (
    Coordinates,
    ProcessMesh,
    box_of,
    extents,
    mesh_coordinates,
    value_placements,
)
from shardwise.runtime.graphs.redistribute import CollectiveRequest, redistribute_steps

COUNTS = (2, 2)


class Place(ProcessMesh):
    """A rank of a mesh without processes."""

    def __init__(self, here: Coordinates) -> None:
        self.counts, self.here = COUNTS, here


def first_call(here: Coordinates, shape: Sequence[int], start: Sequence[Placement]) -> CollectiveRequest:
    """The first collective with which the rank at `here` redistributes a tensor from `start` to its
    transpose."""
    grid, end = Place(here), value_placements(start[::-1])
    form = value_placements(start)
    local = torch.zeros(extents(box_of(tuple(shape), COUNTS, form, here)))
    return next(redistribute_steps(grid, local, shape, form, end))


SHAPES = ((7, 5), (3, 9), (8, 8))


def test_the_length_of_a_message_is_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-to-alls of uneven shards: the sizes that ranks send differ. If these decided, ranks would batch
    different collectives (7 x 5 and 3 x 9 in 2 x 2 shards)."""
    start = (shard(0), shard(1))
    calls = {here: [first_call(here, shape, start) for shape in SHAPES] for here in mesh_coordinates(COUNTS)}
    assert {tuple(call.key for call in own) for own in calls.values()} == {
        ((1, (0, 1), "torch.float32"),) * 3
    }
    assert {tuple(call.nbytes for call in own) for own in calls.values()} == {(4 * 35, 4 * 27, 4 * 64)}
    sent = {here: tuple(4 * call.sent.numel() for call in own) for here, own in calls.items()}
    assert len(set(sent.values())) > 1
    monkeypatch.setattr(redistribute, "MAX_BATCH_BYTES", 4 * 62)  # 35 + 27 elements
    assert {redistribute._fitting([call.nbytes for call in own]) for own in calls.values()} == {2}
    bounds = {total for own in sent.values() for total in accumulate(own)}
    assert any(
        len({sum(total <= most for total in accumulate(own)) for own in sent.values()}) > 1 for most in bounds
    )  # a decision by sent sizes differs between ranks


@pytest.mark.parametrize("dim", [0, 1])
def test_contiguous_rows_are_sent_without_a_copy(dim: int) -> None:
    """A partial sum becomes shards along its first dim; along its second, rows must be reordered."""
    grid, shape = Place((1, 0)), (4, 6)
    local = torch.arange(24.0).view(shape)
    start, end = value_placements((PARTIAL, REPLICATE)), value_placements((shard(dim), REPLICATE))
    sent = next(redistribute_steps(grid, local, shape, start, end)).sent
    assert torch.equal(sent, torch.cat([each.flatten() for each in local.chunk(2, dim)]))
    assert (sent.untyped_storage() is local.untyped_storage()) == (dim == 0)


@pytest.mark.parametrize("dim", [0, 1])
def test_contiguous_rows_are_received_in_place(dim: int) -> None:
    """Shards become the whole tensor; if they are along its first dim, the received buffer is the result."""
    grid, shape = Place((1, 0)), (4, 6)
    whole = torch.arange(24.0).view(shape)
    parts = whole.chunk(2, dim)
    came = torch.cat([part.flatten() for part in parts])
    coroutine = redistribute_steps(
        grid,
        parts[1],
        shape,
        value_placements((shard(dim), REPLICATE)),
        value_placements((REPLICATE, REPLICATE)),
    )
    assert next(coroutine).kind == "all_gather"
    with pytest.raises(StopIteration) as end:
        coroutine.send(list(came.split(12)))
    assert torch.equal(end.value.value, whole)
    assert (end.value.value.untyped_storage() is came.untyped_storage()) == (dim == 0)


def test_sums_reuse_contiguous_memory() -> None:
    """Only where tensors are contiguous, adjacent and in order."""
    memory = torch.arange(6.0)
    first, second = memory.split([2, 4])
    row = redistribute.contiguous_view([first, second])
    assert row is not None and row.untyped_storage() is memory.untyped_storage()
    assert torch.equal(row, memory)
    assert redistribute.contiguous_view([second, first]) is None
    assert redistribute.contiguous_view([first, memory[3:]]) is None
    assert redistribute.contiguous_view([memory[::2]]) is None
    assert redistribute.contiguous_view([first, second.clone()]) is None
