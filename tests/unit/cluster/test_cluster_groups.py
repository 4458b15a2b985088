"""Tiers of nodes in another order than the cluster's, or of some of its nodes."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from shardwise.cluster import (
    Cluster,
    NodeGroups,
    NodeState,
    cluster_of_nodes,
    cluster_of_pools,
    load_cluster,
    pools_of,
    uniform_cluster,
)

RACKS = """
nodes: [{count: 8, device: A100-80G, devices: 8}]
tiers:
  - {name: NVLink 3, span: node, bandwidth: 300GB/s, latency: 1.9us}
  - {name: rack, span: 16, bandwidth: 25GB/s, latency: 4us, network: true}
  - {name: room, span: 32, bandwidth: 12GB/s, latency: 6us, network: true}
  - {name: WAN, bandwidth: 1GB/s, latency: 11ms, network: true}
"""
"""Racks of two nodes, rooms of two racks, two rooms."""


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("racks") / "racks.yaml"
    Path(path).write_text(RACKS)
    return load_cluster(str(path))


def spans(cluster: Cluster) -> dict[str, int]:
    return {tier.name: tier.span for tier in cluster.tiers}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0, 1], {"NVLink 3": 8, "rack": 16}),
        ([1, 0, 3, 2], {"NVLink 3": 8, "rack": 16, "room": 32}),
        ([6, 7, 4, 5, 2, 3], {"NVLink 3": 8, "rack": 16, "room": 32, "WAN": 48}),
        # Without n0: n1 and n2 are in two racks, n3 and n4 in two rooms.
        ([1, 2, 3, 4, 5, 6, 7], {"NVLink 3": 8, "WAN": 56}),
        ([1, 2, 3], {"NVLink 3": 8, "room": 24}),
        # The same nodes, racks and rooms, in order.
        ([4, 5, 6, 7, 2, 3, 1], {"NVLink 3": 8, "rack": 16, "room": 32, "WAN": 56}),
        # Whole racks of different rooms: the spans of rooms no longer hold, those of racks do.
        ([0, 1, 4, 5], {"NVLink 3": 8, "rack": 16, "WAN": 32}),
        # Two nodes of two racks of one room.
        ([0, 2], {"NVLink 3": 8, "room": 16}),
        ([0, 4], {"NVLink 3": 8, "WAN": 16}),
    ],
)  # fmt: skip
def test_a_tier_joins_those_that_the_cluster_has_together(
    racks: Cluster, places: list[int], expected: dict[str, int]
) -> None:
    assert spans(cluster_of_nodes(racks, places)) == expected
    state = NodeState(pool=0, spans=NodeGroups(racks).changed_spans(places, places[0]))
    assert spans(uniform_cluster(racks, pools_of(racks)[0], len(places), state)) == expected


def test_a_permutation_of_nodes_within_racks_keeps_the_cluster(racks: Cluster) -> None:
    assert cluster_of_nodes(racks, [1, 0, 2, 3, 5, 4, 7, 6]) is racks
    assert cluster_of_nodes(racks, [4, 5, 6, 7, 0, 1, 2, 3]) is racks
    assert cluster_of_nodes(racks, [0, 2, 1, 3, 4, 5, 6, 7]) is not racks


def test_every_span_is_the_largest_that_holds(racks: Cluster) -> None:
    """By brute force over all orders of four nodes: any two neighbours in a group of a tier are in one group
    of the cluster's tier, and no larger divisor of its span has this property.
    """
    groups = NodeGroups(racks)
    for order in permutations(range(4)):
        rack, outer = groups.common_spans(order)
        together = [{place // 2 for place in order[begin : begin + 2]} for begin in (0, 2)]
        assert (rack == 16) == all(len(one) == 1 for one in together)
        assert rack in (8, 16) and outer == 32


def test_scale_up_groups_are_filled_node_by_node() -> None:
    """72 GB200 are 18 nodes of 4: n0 to n17 and n18 to n35."""
    cluster = load_cluster("36x4xGB200")
    assert spans(cluster_of_nodes(cluster, range(18, 36))) == {"NVLink 5": 72}
    assert spans(cluster_of_nodes(cluster, range(1, 36))) == {"NVLink 5": 4, "InfiniBand": 140}
    assert spans(cluster_of_nodes(cluster, [*range(18, 36), *range(1, 18)])) == {
        "NVLink 5": 72,
        "InfiniBand": 140,
    }
    assert spans(cluster_of_nodes(cluster, [0, 18])) == {"NVLink 5": 4, "InfiniBand": 8}
    assert spans(cluster_of_nodes(cluster, [0, 1])) == {"NVLink 5": 8}


def test_groups_stay_whole_and_full_ones_are_used_first(racks: Cluster) -> None:
    groups = NodeGroups(racks)
    # n2 is the worst and n0 is gone: three nodes of the first room are left, and its whole rack comes before
    # n1.
    order = groups.ordered([1, 2, 3, 4, 5, 6, 7], lambda place: (place == 2, place))
    assert order == [4, 5, 6, 7, 3, 2, 1]
    assert groups.common_spans(order) == (16, 32)


def test_clusters_without_tiers_between_nodes_have_no_groups() -> None:
    groups = NodeGroups(load_cluster("4x8xH100-SXM"))
    assert (
        not groups.has_any and groups.common_spans([3, 1, 2]) == () and groups.changed_spans([3, 1], 3) == ()
    )
    assert groups.ordered([0, 1, 2], lambda place: (-place,)) == [2, 1, 0]


def test_tiers_inside_sites_and_between_them_are_distinguished(racks: Cluster) -> None:
    groups = NodeGroups(racks)
    assert groups.separate_tiers([0, 1, 2, 3], [4, 5, 6, 7]) == 2
    assert groups.separate_tiers([0, 1], [2, 3]) == 1
    assert groups.separate_tiers([0], [1]) == 0


def test_nodes_of_two_sizes_have_the_tiers_inside_the_larger(tmp_path: Path) -> None:
    """Two nodes of 8 fill a rack of 16, four of 4 another."""
    path = tmp_path / "sizes.yaml"
    path.write_text(
        """
nodes: [{count: 2, device: A100-80G, devices: 8}, {count: 4, device: V100-32G, devices: 4}]
tiers:
  - {name: NVLink, span: 4, bandwidth: 150GB/s, latency: 1.9us}
  - {name: rack, span: 16, bandwidth: 10GB/s, latency: 4us, network: true}
  - {name: room, bandwidth: 5GB/s, latency: 6us, network: true}
"""
    )
    cluster = load_cluster(str(path))
    assert spans(cluster_of_nodes(cluster, [2, 3])) == {"NVLink": 4, "rack": 8}
    # n1, and n2 with n3: 8 devices of each rack.
    assert spans(cluster_of_nodes(cluster, [1, 2, 3])) == {"NVLink": 4, "rack": 8, "room": 16}
    small = pools_of(cluster)[1]
    state = NodeState(pool=1, spans=NodeGroups(cluster).changed_spans([2, 3, 4, 5], 2))
    assert spans(uniform_cluster(cluster, small, 4, state)) == {"NVLink": 4, "rack": 16}
    state = NodeState(pool=1, spans=NodeGroups(cluster).changed_spans([1, 2, 3], 2))
    assert spans(uniform_cluster(cluster, small, 4, state)) == {"NVLink": 4, "rack": 8, "room": 16}


def test_a_pool_over_several_racks_has_no_groups(tmp_path: Path) -> None:
    """Racks of an A100 node and a V100 node each: the A100 nodes meet between racks; so do all four."""
    path = tmp_path / "pools.yaml"
    nodes = ", ".join("{device: A100-80G, devices: 8}, {device: V100-32G, devices: 8}" for _ in range(2))
    tiers = [line for line in RACKS.splitlines()[2:] if "room" not in line]
    path.write_text("\n".join([f"nodes: [{nodes}]", *tiers]))
    cluster = load_cluster(str(path))
    assert spans(cluster) == {"NVLink 3": 8, "rack": 16, "WAN": 32}
    assert spans(cluster_of_pools(cluster, pools_of(cluster)[:1])) == {"NVLink 3": 8, "WAN": 16}
    assert cluster_of_pools(cluster, pools_of(cluster)) is cluster
