"""Messages between neighbouring stages, each over the tier between the two."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.unit.cost.hand_made import brick_model, cluster, end_of, exposed, problem, times_of, with_software
from tests.unit.cost.test_cost_fabric import tiers

from shardwise.cluster import Cluster
from shardwise.cost.collectives import HopTimes, Neighbours, neighbours_of

SETTINGS = [
    # (spans of tiers, pp, stride): pipelines within, along and across nodes, aligned with them or not.
    ((2, 4, 16), 4, 1),
    ((4, 16), 8, 2),
    ((4, 16), 2, 4),
    ((8, 24), 3, 1),
    ((8, 24), 3, 4),
    ((8, 24), 6, 3),
    ((8, 24), 4, 3),
    ((8, 48), 12, 3),
    ((12, 24), 4, 5),
    ((6, 12, 36), 9, 1),
    ((3, 12), 6, 2),
    ((16, 32), 16, 1),
    ((4, 16), 8, 1),
    ((6, 24), 12, 1),
    ((8, 32), 16, 3),
    ((10, 40), 8, 5),
]


def counted_tier(spans: tuple[int, ...], pp: int, stride: int, first: int, second: int) -> int:
    """The innermost tier whose groups contain both ranks of every pair on the pipeline ranks `first` and
    `second`, in a cluster so large that pipelines have every possible alignment.
    """
    devices = spans[-1] * pp * stride
    ranks = [rank for rank in range(devices) if rank // stride % pp == first]
    pairs = [(rank, rank + (second - first) * stride) for rank in ranks]
    inner = [all(a // span == b // span for a, b in pairs) for span in spans[:-1]]
    return next((tier for tier, is_inside in enumerate(inner) if is_inside), len(spans) - 1)


def neighbours(spans: tuple[int, ...], pp: int, stride: int) -> Neighbours:
    return neighbours_of(tiers(*spans), np.array([pp]), np.array([stride]))


@pytest.mark.parametrize(("spans", "pp", "stride"), SETTINGS)
def test_tiers_are_those_of_listed_ranks(spans: tuple[int, ...], pp: int, stride: int) -> None:
    found = neighbours(spans, pp, stride)
    counted = [counted_tier(spans, pp, stride, *pair) for pair in pairwise(range(pp))]
    assert [int(found.tier(rank)[0]) for rank in range(pp - 1)] == counted
    assert int(found.wraparound_tier[0]) == counted_tier(spans, pp, stride, 0, pp - 1)
    assert [int(each[0]) for each in found.leaving] == [
        sum(tier > t for tier in counted) for t in range(-1, len(spans))
    ]


def test_the_settings_distinguish_hops() -> None:
    counted = [
        {counted_tier(spans, pp, stride, *pair) for pair in pairwise(range(pp))}
        for spans, pp, stride in SETTINGS
    ]
    assert sum(len(tiers_of) > 1 for tiers_of in counted) > 5


def counted_senders(spans: tuple[int, ...], pp: int, stride: int, tier: int) -> int:
    """The most devices of one group below the tier that send over it at one hop; 0 where none does."""
    inside = spans[tier - 1] if tier else 1
    counts = [0]
    for first in range(pp - 1):
        ranks = [rank for rank in range(spans[-1] * pp * stride) if rank // stride % pp == first]
        leaving = Counter(rank // inside for rank in ranks if rank // inside != (rank + stride) // inside)
        counts += leaving.values()
    return max(counts)


@pytest.mark.parametrize(("spans", "pp", "stride"), SETTINGS)
def test_senders_are_those_of_listed_ranks(spans: tuple[int, ...], pp: int, stride: int) -> None:
    # A single sender is faster than any share, so the number of senders matters.
    wide = tuple(replace(tier, flow_bytes_per_s=1e9) for tier in tiers(*spans))
    found = neighbours_of(wide, np.array([pp]), np.array([stride])).senders
    counted = [counted_senders(spans, pp, stride, tier) for tier in range(len(spans))]
    # Where stages do not fit the groups, the last devices of a group belong to two stages and all count.
    fits = [max(inside, stride) % min(inside, stride) == 0 for inside in (1, *spans[:-1])]
    for each, number, is_exact in zip(found, counted, fits, strict=True):
        assert int(each[0]) == number if is_exact else int(each[0]) >= number


def on_cards(alone: float) -> Cluster:
    """Two nodes of four that share 80 B/s; a single device has at most `alone`."""
    on = cluster(2)
    return replace(on, tiers=(on.tiers[0], replace(on.tiers[1], flow_bytes_per_s=alone)))


@pytest.mark.parametrize(
    ("alone", "text", "seconds"),
    [
        # One card of 80 B/s: the last device of a node has all of it, two have half each, four a quarter.
        (80.0, "pp=8", 1.25),
        (80.0, "pp=4,dp=2", 2.5),
        (80.0, "pp=2,dp=4", 5.0),
        (80.0, "pp=2,tp=4,sequence_parallel=true", 1.25),  # four quarters of the message
        # Two cards of 40 B/s: two neighbours share the one next to them, as each pair of all four does.
        (40.0, "pp=8", 2.5),
        (40.0, "pp=4,dp=2", 5.0),
        (40.0, "pp=2,dp=4", 5.0),
        # One card each.
        (20.0, "pp=8", 5.0),
    ],
)
def test_messages_share_the_card_with_those_that_send_at_once(
    alone: float, text: str, seconds: float
) -> None:
    # 100 B over the network; within a node 1 s, or less.
    p = exposed(problem(brick_model((0,) * 8), on_cards(alone)))
    assert times_of(p, text).hop_s.max() == pytest.approx(seconds)


def test_tied_ends_share_the_card_too() -> None:
    # Half of 200 weights of 4 B in both directions, twice: by a single device of a node 2 * 400 / 80, by four
    # 2 * 400 / 20.
    p = exposed(problem(brick_model((0,) * 8, tied=True), on_cards(80.0)))
    assert end_of(p, "pp=8").tied_s[0] == pytest.approx(10.0)
    assert end_of(p, "pp=2,dp=4").tied_s[0] == pytest.approx(40.0)


def test_means_and_least_of_hops() -> None:
    # Four stages in a row on nodes of two: two hops of 1 s, one of 5 s; the hop back to the first 5 s.
    hops = HopTimes(neighbours((2, 8), 4, 1), np.array([[1.0], [5.0]]))
    assert hops.mean_s.tolist() == [pytest.approx(7.0 / 3.0)]
    assert hops.shortest_s.tolist() == [1.0]
    # Two stages four apart: each hop leaves its node.
    apart = HopTimes(neighbours((4, 8), 2, 4), np.array([[1.0], [5.0]]))
    assert (apart.mean_s.tolist(), apart.shortest_s.tolist()) == ([5.0], [5.0])


def test_hops_of_chunks_and_of_a_v() -> None:
    hops = HopTimes(neighbours((2, 8), 4, 1), np.array([[1.0], [5.0]]))
    chunked = hops.after_s(np.arange(7)[:, None], np.array([False]))
    assert chunked[:, 0].tolist() == [1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0]
    turned = hops.after_s(np.arange(7)[:, None], np.array([True]))
    assert turned[:, 0].tolist() == [1.0, 5.0, 1.0, 0.0, 1.0, 5.0, 1.0]


def test_stages_send_over_their_own_tiers() -> None:
    # Eight stages in a row on two nodes of four: 1 s within a node, 5 s from the fourth to the fifth.
    p = exposed(problem(brick_model((0,) * 8), cluster(2)))
    times = times_of(p, "pp=8")
    assert times.hop_s[:, 0].tolist() == [1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 0.0]
    # Software that overlaps a quarter of its messages: forwards and backwards wait for the rest.
    waits = times_of(with_software(p, pipeline_overlap=0.25), "pp=8")
    assert waits.hop_s[:, 0].tolist() == [0.25, 0.25, 0.25, 1.25, 0.25, 0.25, 0.25, 0.0]
    on = waits.forward_s - times.forward_s
    back = waits.backward_input_s - times.backward_input_s
    np.testing.assert_allclose(on[:, 0], [0.75, 0.75, 0.75, 3.75, 0.75, 0.75, 0.75, 0.0], atol=1e-12)
    np.testing.assert_allclose(back[:, 0], [0.0, 0.75, 0.75, 0.75, 3.75, 0.75, 0.75, 0.75], atol=1e-12)
