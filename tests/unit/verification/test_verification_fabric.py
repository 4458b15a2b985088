"""Groups and collectives of the checker, computed by hand from docs/concepts/cost-model.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.checker_records import cluster_of
from tests.unit.cost.hand_made import cluster, with_efficiency
from tests.unit.verification.by_hand import strategy

from shardwise.cluster import Cluster
from shardwise.cluster.device import CollectiveCurve
from shardwise_verify.collectives import (
    Fabric,
    TierCost,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    fabric_of,
    groups_of,
    hop_senders,
    hop_tier,
    inner,
    outer,
    send_s,
    sizes,
)
from shardwise_verify.strategy_rows import Column, distinct, rows_of, strides

FABRIC = (
    TierCost(latency_s=1.0, bytes_per_s=100.0, start_s=0.5, in_switch=False, partial=1.0, inside=1),
    TierCost(latency_s=2.0, bytes_per_s=20.0, start_s=0.25, in_switch=False, partial=0.5, inside=4),
)
"""Inside: 1 s of latency, 100 B/s, 0.5 s to start. Outside nodes of four: 2 s, 20 B/s, half of it for rings
through parts of nodes, 0.25 s.
"""


def ideal_fabric(on: Cluster) -> Fabric:
    """The checker's fabric of a cluster of ideal devices."""
    read = cluster_of(on)
    return fabric_of(read, read.classes["ideal"].efficiency, read.classes["ideal"].backend)


def group(*members: int) -> tuple[Column, ...]:
    return tuple(np.array([size]) for size in members)


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [
        (1, 4, (4, 1)),  # four neighbours fill a node
        (2, 4, (2, 2)),  # every second rank: two in each of two nodes
        (4, 2, (1, 2)),  # one in each node
        (3, 2, (1, 2)),  # ranks 0 and 3 share a node, ranks 3 and 6 do not: the worst group counts
        (1, 6, (2, 3)),  # 6 ranks: gcd(6, 4) = 2 always share a node
        (1, 1, (1, 1)),
    ],
)
def test_sizes_on_nodes_of_four(stride: int, size: int, expected: tuple[int, int]) -> None:
    found = sizes([4, 24], np.array([stride]), np.array([size]))
    assert tuple(int(part[0]) for part in found) == expected


def test_the_closest_members_and_the_other_ones() -> None:
    assert [part.tolist() for part in inner(group(2, 4), np.array([4]))] == [[2], [2]]
    assert [part.tolist() for part in outer(group(2, 4), group(2, 2))] == [[1], [2]]
    # 3 of (2, 3): gcd(2, 3) = 1 inside, so all three are on different nodes.
    assert [part.tolist() for part in inner(group(2, 3), np.array([3]))] == [[1], [3]]


def test_groups_follow_the_axis_order() -> None:
    """8 devices, tp 2 x dp 4: with tp fastest its pairs are within nodes, dp two by two; with dp fastest it
    fills a node.
    """
    first = strategy(tp=2, dp=4)
    rows = rows_of([first, replace(first, axis_order="cp-dp-tp-pp")])
    assert strides(rows)["dp"].tolist() == [2, 1]
    assert strides(rows)["tp"].tolist() == [1, 4]
    groups = groups_of(rows, cluster_of(cluster(2)))
    assert [part.tolist() for part in groups.tensor] == [[2, 1], [1, 2]]
    assert [part.tolist() for part in groups.data] == [[2, 4], [2, 1]]


def test_experts_skip_the_ranks_of_other_stages() -> None:
    """pp 2 fastest, tp 4: the ranks of a stage are 2 apart, so ep 4 has two in each node."""
    rows = rows_of([strategy(tp=4, pp=2, ep=4, axis_order="pp-tp-cp-dp")])
    groups = groups_of(rows, cluster_of(cluster(2)))
    assert [part.tolist() for part in groups.expert] == [[2], [2]]
    # The two stages are neighbours in one node; after four tensor ranks they are not.
    assert hop_tier(groups, 0, 1).tolist() == [0]
    assert hop_tier(groups_of(rows_of([strategy(tp=4, pp=2)]), cluster_of(cluster(2))), 0, 1).tolist() == [1]


def test_each_hop_crosses_its_own_tier() -> None:
    """Eight stages in a row on two nodes of four: the fourth hop leaves the node, as does the hop back to the
    first. With pipelines of three (on nodes that are a multiple of 2, not of 3) each hop leaves it in some
    pipeline.
    """
    groups = groups_of(rows_of([strategy(pp=8)]), cluster_of(cluster(2)))
    assert [int(hop_tier(groups, rank, rank + 1)[0]) for rank in range(7)] == [0, 0, 0, 1, 0, 0, 0]
    assert int(hop_tier(groups, 0, 7)[0]) == 1
    threes = groups_of(rows_of([strategy(pp=3, dp=4, axis_order="pp-tp-cp-dp")]), cluster_of(cluster(3)))
    assert [int(hop_tier(threes, rank, rank + 1)[0]) for rank in range(2)] == [1, 1]


def test_how_many_send_at_once() -> None:
    """Two nodes of four with a card of 80 B/s each. With stages of one, two and four ranks as many of a node
    send outside; four are all of them. None does where pipelines are within nodes; with a card per device
    the rate is that of all.
    """
    plain = cluster(2)
    on = replace(plain, tiers=(plain.tiers[0], replace(plain.tiers[1], flow_bytes_per_s=80.0)))
    rows = rows_of([strategy(pp=8), strategy(pp=4, dp=2), strategy(pp=2, dp=4)])
    groups = groups_of(rows, cluster_of(on))
    assert [hop_senders(groups, tier).tolist() for tier in (0, 1)] == [[0, 0, 0], [1, 2, 0]]
    assert hop_senders(groups_of(rows, cluster_of(plain)), 1).tolist() == [0, 0, 0]
    inside = rows_of([strategy(pp=4, dp=2, axis_order="pp-tp-cp-dp"), strategy(dp=8)])
    assert hop_senders(groups_of(inside, cluster_of(on)), 1).tolist() == [0, 0]


def test_equal_rows_are_one() -> None:
    first, of = distinct([np.array([3, 1, 3, 3]), np.array(["a", "a", "a", "b"])])
    assert len(first) == 3
    assert of[0] == of[2] and len(set(of.tolist())) == 3
    assert first[of[3]] == 3


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((1, 1), 0.0),
        ((4, 1), 4.1),  # 3 * 1 + 3/4 * 80/100 + 0.5
        ((1, 2), 4.25),  # 1 * 2 + 1/2 * 80/20 + 0.25
        ((4, 2), 15.375),  # whole nodes: 7 * 2 + 7/8 * max(80/100, 80/(4 * 20)) + 0.5
        ((2, 2), 9.5),  # parts of nodes: 3 * 2 + 3/4 * 80/(2 * 20 * 0.5) + 0.5
    ],
)
def test_a_pass(members: tuple[int, int], expected: float) -> None:
    assert all_gather_s(FABRIC, 80.0, group(*members))[0] == pytest.approx(expected)


def test_a_ring_is_as_fast_as_its_slowest_hop() -> None:
    """400 B without latency outside. Half of each node: 3 * 1 + 3/4 * 400 / (2 * 20 * 0.5) + 0.5; all of it:
    7 * 1 + 7/8 * max(400 / 100, 400 / (4 * 20)) + 0.5; one rank of each: 1/2 * 400 / 20.
    """
    fast = (FABRIC[0], replace(FABRIC[1], latency_s=0.0, start_s=0.0))
    assert all_gather_s(fast, 400.0, group(2, 2))[0] == pytest.approx(18.5)
    assert all_gather_s(fast, 400.0, group(4, 2))[0] == pytest.approx(7 + 4.375 + 0.5)
    assert all_gather_s(fast, 400.0, group(1, 2))[0] == pytest.approx(10.0)
    # Each row of a column has its own part.
    both = all_gather_s(fast, 400.0, (np.array([2, 4]), np.array([2, 2])))
    assert both == pytest.approx([18.5, 11.875])


def test_parts_of_nodes_with_one_card_have_all_of_it() -> None:
    # Two of four on each of two nodes: 3 * 2 + 3/4 * 400 / (2 * 20) + 0.5; by two cards at half that pace.
    one, two = (replace(FABRIC[1], lone_factor=lone_factor) for lone_factor in (4.0, 2.0))
    assert all_gather_s((FABRIC[0], one), 400.0, group(2, 2))[0] == pytest.approx(6 + 7.5 + 0.5)
    assert all_gather_s((FABRIC[0], two), 400.0, group(2, 2))[0] == pytest.approx(6 + 15.0 + 0.5)


def test_tiers_of_a_cluster() -> None:
    curves = {
        "scale_up": CollectiveCurve(fraction=0.5, startup_s=0.2),
        "scale_out": CollectiveCurve(
            fraction=0.25, startup_s=4.0, partial_fraction=0.5, exchange_fraction=0.75, lockstep_s=0.125
        ),
    }
    on = cluster(2, of=with_efficiency(**curves), latency_s=(0.5, 2.0), in_switch=True)
    # 100 and 20 B/s, of which collectives reach 50 and 5; four devices share a node below the network.
    assert ideal_fabric(on) == (
        TierCost(latency_s=0.5, bytes_per_s=50.0, start_s=0.2, in_switch=True, partial=1.0, inside=1),
        TierCost(
            latency_s=2.0,
            bytes_per_s=5.0,
            start_s=4.0,
            in_switch=False,
            partial=0.5,
            inside=4,
            pairwise=0.75,
            wait_s=0.125,
        ),
    )
    # Nine nodes share the links between them: 5 / 9^(1/2).
    curves["scale_out"] = replace(curves["scale_out"], crowding=0.5)
    crowded = cluster(9, of=with_efficiency(**curves))
    found = ideal_fabric(crowded)
    assert [tier.bytes_per_s for tier in found] == pytest.approx([50.0, 5.0 / 3])


def test_ranks_wait_for_each_other_at_collectives_alone() -> None:
    """3.25 s outside before the first byte, and 0.5 s inside."""
    waiting = (FABRIC[0], replace(FABRIC[1], wait_s=3.0))
    for collective in (all_gather_s, all_reduce_s):
        assert collective(waiting, 80.0, group(2, 2))[0] == collective(FABRIC, 80.0, group(2, 2))[0] + 2.75
    sent = all_to_all_s(FABRIC, 80.0, group(2, 2), 1.0)[0]
    assert all_to_all_s(waiting, 80.0, group(2, 2), 1.0)[0] == sent + 2.75
    assert send_s(waiting, 80.0, np.array([1])) == send_s(FABRIC, 80.0, np.array([1]))


def test_groups_without_a_switch_have_the_links_between_them() -> None:
    """Two of four share a quarter of 100 B/s. A collective of 80 B: 1 + 1/2 * 80 / 25 + 0.5; three have the
    same share, 2 * 1 + 2/3 * 3.2 + 0.5; four have all of it. All-reduce of two: twice 1 + 1.6, or trees, 2
    + 6.4; + 0.5.
    """
    linked = (replace(FABRIC[0], links=((2, 0.25), (4, 1.0))), FABRIC[1])
    sizes = (np.array([2, 3, 4]), np.array([1, 1, 1]))
    assert all_gather_s(linked, 80.0, sizes) == pytest.approx([3.1, 2 + 6.4 / 3 + 0.5, 4.1])
    assert all_reduce_s(linked, 80.0, group(2, 1))[0] == pytest.approx(5.7)
    # 80 B to the other: 40 / 25 and 1 s of latency; a message 1 + 0.5 + 80 / 25, outside as before.
    assert all_to_all_s(linked, 80.0, group(2, 1), 1.0)[0] == pytest.approx(3.1)
    assert send_s(linked, 80.0, np.array([0, 1])) == pytest.approx([4.7, 6.25])
    on = cluster(2)
    tiers = (replace(on.tiers[0], part_shares=((2, 0.25), (4, 1.0))), on.tiers[1])
    found = ideal_fabric(replace(on, tiers=tiers))
    assert [tier.links for tier in found] == [((2, 0.25), (4, 1.0)), ()]


def test_an_all_reduce_takes_the_best_of_three_algorithms() -> None:
    # Twice the collective: 18. Trees: 2 * log2(4) * 2 + 80 / (2 * 20 * 0.5) = 12, since each tier joins two.
    # Plus 0.5.
    assert all_reduce_s(FABRIC, 80.0, group(2, 2))[0] == pytest.approx(12.5)
    # A library without such trees sends twice: 16.
    without = tuple(replace(tier, has_trees=False) for tier in FABRIC)
    assert all_reduce_s(without, 80.0, group(2, 2))[0] == pytest.approx(16.5)
    switched = tuple(replace(tier, in_switch=True) for tier in FABRIC)
    # In the switches: 2 * 2 + 4 = 8. Plus 0.5.
    assert all_reduce_s(switched, 80.0, group(2, 2))[0] == pytest.approx(8.5)
    # One tier with switches does not help where the other has none.
    assert all_reduce_s((switched[0], FABRIC[1]), 80.0, group(2, 2))[0] == pytest.approx(12.5)
    # Whole nodes have the full speed: trees 2 * 3 * 2 + max(2 * 80 / 100, 80 / (4 * 20)) = 13.6, twice the
    # collective 2 * 14.875; + 0.5.
    assert all_reduce_s(FABRIC, 80.0, group(4, 2))[0] == pytest.approx(14.1)
    # Four nodes: trees 2 * 4 * 2 + 2 * 1 = 18, twice the collective 2 * 30.9; + 0.5.
    assert all_reduce_s(FABRIC, 80.0, group(4, 4))[0] == pytest.approx(18.5)
    # 64 inside: twice the collective 2 * (63 + 63/64 * 0.8) = 127.575; trees 2 * 6 * 1 + 2 * 0.8 = 13.6; +
    # 0.5.
    assert all_reduce_s(FABRIC, 80.0, group(64, 1))[0] == pytest.approx(14.1)


def test_an_all_to_all_sends_fewer_copies_outside() -> None:
    # 80 B to 4 ranks: inside 80 * 1 / 4 / 100 = 0.2 s, outside 80 * 2 / 4 / 20 = 2 s; 2 s of latency; + 0.5.
    assert all_to_all_s(FABRIC, 80.0, group(2, 2), 1.0)[0] == pytest.approx(4.5)
    assert all_to_all_s(FABRIC, 80.0, group(2, 2), 0.5)[0] == pytest.approx(3.5)
    assert all_to_all_s(FABRIC, 80.0, group(1, 1), 1.0)[0] == 0.0


def test_two_ranks_that_send_to_each_other_share_the_bandwidth() -> None:
    # A collective of two outside: 2 + 1/2 * 80 / (20 * 0.25) + 0.25; of four, or of two inside, as without.
    mutual = (FABRIC[0], replace(FABRIC[1], pairwise=0.25))
    assert all_gather_s(mutual, 80.0, group(1, 2))[0] == pytest.approx(10.25)
    for members in ((2, 1), (2, 2)):
        assert (
            all_gather_s(mutual, 80.0, group(*members))[0] == all_gather_s(FABRIC, 80.0, group(*members))[0]
        )
    # 80 B to 4 ranks: outside 80 * 2 / 4 / (20 * 0.25) = 8 s; 2 s of latency; + 0.5.
    assert all_to_all_s(mutual, 80.0, group(2, 2), 1.0)[0] == pytest.approx(10.5)


def test_a_message() -> None:
    # 1 + 0.5 + 0.8 inside, 2 + 0.25 + 4 outside.
    assert send_s(FABRIC, 80.0, np.array([0, 1])) == pytest.approx([2.3, 6.25])
    # A single sender is three times as fast outside: 2 + 0.25 + 80 / 60; two at once 80 / 30, four 80 / 20.
    wide = (FABRIC[0], replace(FABRIC[1], lone_factor=3.0))
    found = send_s(wide, 80.0, np.array([1, 1, 1, 1]), np.array([1, 2, 4, 0]))
    assert found == pytest.approx([2.25 + 4 / 3, 2.25 + 8 / 3, 6.25, 6.25])
