"""Which collectives go as one message is decided alike on all ranks, whatever parts they have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from shardwise.graph import Placement, shard
from shardwise.runtime.graphs import messages
from shardwise.runtime.graphs.bring import moving
from shardwise.runtime.graphs.forms import Coordinates, box_of, extents, places, value_form
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.messages import Call

COUNTS = (2, 2)


class Place(Grid):
    """A rank of a mesh without processes."""

    def __init__(self, here: Coordinates) -> None:
        self.counts, self.here = COUNTS, here


def first_call(here: Coordinates, shape: Sequence[int], start: Sequence[Placement]) -> Call:
    """What the rank at `here` asks for first of all to bring a tensor from `start` to its transpose."""
    grid, end = Place(here), value_form(start[::-1])
    form = value_form(start)
    local = torch.zeros(extents(box_of(tuple(shape), COUNTS, form, here)))
    return next(moving(grid, local, shape, form, end))


SHAPES = ((7, 5), (3, 9), (8, 8))


def test_how_long_a_message_is_is_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges of parts that do not go evenly: what ranks send themselves differs, and by that they would
    put other calls together (7 x 5 and 3 x 9 in 2 x 2 parts)."""
    start = (shard(0), shard(1))
    calls = {here: [first_call(here, shape, start) for shape in SHAPES] for here in places(COUNTS)}
    assert {tuple(call.key for call in own) for own in calls.values()} == {
        ((1, (0, 1), "torch.float32"),) * 3
    }
    assert {tuple(call.nbytes for call in own) for own in calls.values()} == {(4 * 35, 4 * 27, 4 * 64)}
    sent = {here: tuple(4 * call.sent.numel() for call in own) for here, own in calls.items()}
    assert len(set(sent.values())) > 1
    monkeypatch.setattr(messages, "MOST_BYTES", 4 * 62)  # 35 + 27 elements
    assert {messages._fitting([call.nbytes for call in own]) for own in calls.values()} == {2}
    bounds = {total for own in sent.values() for total in accumulate(own)}
    assert any(
        len({sum(total <= most for total in accumulate(own)) for own in sent.values()}) > 1 for most in bounds
    )  # what is decided by what a rank sends is not decided alike
