"""Transfers of tensor regions, compared with a simulation that follows every element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.runtime.migration import messages_of
from shardwise.runtime.regions import RankRegion, Region, Transfer, overlap, transfers

NODE_OF = (0, 0, 1, 1, 2)
SHAPE = (6, 4)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    ends = [
        sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in SHAPE
    ]
    return tuple((start, stop) for start, stop in ends)


@st.composite
def rank_regions(draw: st.DrawFn) -> list[RankRegion]:
    ranks = st.integers(0, len(NODE_OF) - 1)
    return draw(st.lists(st.builds(RankRegion, ranks, st.integers(0, 1), regions()), min_size=1, max_size=6))


def elements(rank_region: RankRegion) -> set[tuple[int, tuple[int, ...]]]:
    places = itertools.product(*(range(start, stop) for start, stop in rank_region.region))
    return {(rank_region.tensor, place) for place in places}


def regions_by_rank(found: list[RankRegion]) -> list[set[tuple[int, tuple[int, ...]]]]:
    return [
        set().union(*(elements(one) for one in found if one.rank == rank)) for rank in range(len(NODE_OF))
    ]


def carried_out(
    have: list[RankRegion], planned: list[Transfer]
) -> tuple[list[set[tuple[int, tuple[int, ...]]]], int]:
    """The elements that every rank has in the end, and the number of elements sent between nodes. Asserts
    that no rank sends an element that it lacks, or receives one that it has."""
    before = regions_by_rank(have)
    now = [set(own) for own in before]
    between = 0
    for turn in (0, 1):
        known = [set(own) for own in (before if turn == 0 else now)]
        for one in (one for one in planned if one.round == turn):
            sent = elements(RankRegion(one.source, one.tensor, one.region))
            assert sent <= known[one.source] and not sent & now[one.target]
            now[one.target] |= sent
            between += len(sent) * (NODE_OF[one.source] != NODE_OF[one.target])
    return now, between


def least_between(have: list[RankRegion], need: list[RankRegion]) -> int:
    """The number of elements that some node needs and lacks while another holds them: each has to be sent
    once."""
    before, required = regions_by_rank(have), regions_by_rank(need)
    anywhere = set().union(*before)
    total = 0
    for node in set(NODE_OF):
        on = [rank for rank, other in enumerate(NODE_OF) if other == node]
        lacking = set().union(*(required[rank] for rank in on)) - set().union(*(before[rank] for rank in on))
        total += len(lacking & anywhere)
    return total


@given(rank_regions(), rank_regions())
def test_every_rank_receives_each_needed_element_once(have: list[RankRegion], need: list[RankRegion]) -> None:
    planned = transfers(have, need, NODE_OF)
    now, between = carried_out(have, planned)
    anywhere = set().union(*regions_by_rank(have))
    for own, required in zip(now, regions_by_rank(need), strict=True):
        assert required & anywhere <= own
    assert between == least_between(have, need)


def test_the_simulation_sees_a_transfer_that_is_missing_or_sent_twice() -> None:
    have = [RankRegion(0, 0, ((0, 6), (0, 4)))]
    need = [RankRegion(2, 0, ((0, 6), (0, 4))), RankRegion(3, 0, ((0, 3), (0, 4)))]
    planned = transfers(have, need, NODE_OF)
    # Rank 2 gets 24 elements from the other node; rank 3 on the same node takes its 12 from rank 2.
    assert [(one.round, one.source, one.target, one.elements) for one in planned] == [
        (0, 0, 2, 12), (0, 0, 2, 12), (1, 2, 3, 12),
    ]  # fmt: skip
    assert carried_out(have, planned)[1] == least_between(have, need) == 24
    assert regions_by_rank(need)[3] - carried_out(have, planned[:-1])[0][3]
    with pytest.raises(AssertionError):
        carried_out(have, [*planned, planned[-1]])
    straight = [*planned[:2], Transfer(0, 0, 3, 0, ((0, 3), (0, 4)))]
    assert carried_out(have, straight)[1] > least_between(have, need)


def test_sources_are_balanced() -> None:
    """Two ranks of one node hold four tensors of 24 elements; each sends two of them."""
    whole: Region = ((0, 6), (0, 4))
    have = [RankRegion(rank, tensor, whole) for rank in (0, 1) for tensor in range(4)]
    planned = transfers(have, [RankRegion(4, tensor, whole) for tensor in range(4)], NODE_OF)
    assert [one.source for one in planned] == [0, 1, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 1), regions()), min_size=1, max_size=5), st.integers(1, 9))
def test_messages_are_bounded_and_have_every_element_once(found: list[tuple[int, Region]], most: int) -> None:
    planned = [Transfer(0, 0, 1, tensor, region) for tensor, region in found]
    streams = {0: ("model", "exp_avg"), 1: ("model",)}
    counted: dict[tuple[int, str], np.ndarray] = {}
    for message in messages_of(planned, streams, message_bytes=4 * most):
        assert 0 < sum(int(np.prod([b - a for a, b in region])) for _, _, region in message) <= most
        for tensor, kind, region in message:
            there = counted.setdefault((tensor, kind), np.zeros(SHAPE, dtype=int))
            there[tuple(slice(*ends) for ends in region)] += 1
    for tensor, kinds in streams.items():
        right = np.zeros(SHAPE, dtype=int)
        for other, region in found:
            right[tuple(slice(*ends) for ends in region)] += other == tensor
        for kind in kinds:
            assert (counted.get((tensor, kind), np.zeros(SHAPE)) == right).all()


def test_overlaps() -> None:
    assert overlap(((0, 4), (2, 4)), ((3, 6), (0, 3))) == ((3, 4), (2, 3))
    assert overlap(((0, 3), (2, 4)), ((3, 6), (0, 3))) is None
