"""Pools of equal nodes, and the clusters of their unions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.cost.hand_made import cluster as uniform
from tests.unit.cost.hand_made import with_efficiency

from shardwise.cluster import Cluster, Tier, cluster_of_pools, load_cluster, pools_of, tier_of_pool
from shardwise.cluster.device import CollectiveCurve

GIVEN = """\
nodes:
  - {device: A100-80G, count: 2, devices: 8}
  - {device: A100-80G, count: 1, devices: 8, speed: 0.8}
  - {device: V100-16G, count: 2, devices: 4}
tiers:
  - {name: inside, span: 4, bandwidth: 100GB/s, latency: 2us}
  - {name: room, bandwidth: 1GB/s, latency: 9us, network: true}
"""


def test_equal_nodes_are_one_pool_whatever_their_order() -> None:
    pools = pools_of(load_cluster("2x8xA100-80G+1x4xT4+3x8xA100-80G"))
    assert [(pool.name, pool.nodes, pool.devices) for pool in pools] == [("A100-80G", 5, 40), ("T4", 1, 4)]


def test_a_uniform_cluster_is_one_pool_and_its_own_union() -> None:
    cluster = load_cluster("4x8xH100-SXM")
    pools = pools_of(cluster)
    assert len(pools) == 1
    assert cluster_of_pools(cluster, pools) is cluster


def test_a_slow_node_is_a_pool_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(GIVEN)
    pools = pools_of(load_cluster(str(path)))
    assert [pool.name for pool in pools] == ["8xA100-80G", "8xA100-80G at 0.8", "V100-16G"]
    assert [pool.node.speed for pool in pools] == [1.0, 0.8, 1.0]


def test_default_tiers_are_those_of_the_remaining_nodes() -> None:
    cluster = load_cluster("2x8xA100-80G+2x8xV100-32G")
    fast = cluster_of_pools(cluster, pools_of(cluster)[:1])
    alone = load_cluster("2x8xA100-80G")
    assert fast.tiers == alone.tiers  # the V100's slower links and cards are gone
    assert fast.tiers != cluster.tiers
    assert set(fast.classes) == {"A100-80G"} and fast.devices == 16


def test_given_tiers_keep_their_figures(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(GIVEN)
    cluster = load_cluster(str(path))
    first, _, last = pools_of(cluster)
    union = cluster_of_pools(cluster, (first, last))
    assert [node.device_class for node in union.nodes] == ["A100-80G"] * 2 + ["V100-16G"] * 2
    assert [(tier.name, tier.span, tier.bytes_per_s) for tier in union.tiers] == [
        ("inside", 4, 100e9),
        ("room", 24, 1e9),
    ]


def mixed(rate: float, fractions: tuple[float, float]) -> Cluster:
    """Two nodes of four devices `near` on a card of 10 B/s each and two of `far` on cards of 40, with a
    network of `rate` bytes per second and device between them.
    """
    classes = {
        name: replace(with_efficiency(scale_out=CollectiveCurve(fraction=fraction, startup_s=0.0)), name=name)
        for name, fraction in zip(("near", "far"), fractions, strict=True)
    }
    node = uniform(1).nodes[0]
    nodes = [
        replace(node, name=f"{name}{i}", device_class=name, devices=4, nics=1, nic_bytes_per_s=card)
        for name, card in (("near", 10.0), ("far", 40.0))
        for i in range(2)
    ]
    network = Tier(
        name="network", span=16, bytes_per_s=rate, flow_bytes_per_s=4 * rate, latency_s=0.0, is_network=True
    )
    return Cluster(name="mixed", classes=classes, nodes=tuple(nodes), tiers=(network,))


@pytest.mark.parametrize(
    ("rate", "fractions", "seen"),
    [
        # A quarter of 10 B/s each, of which 0.8 are reached: 2. Of far's 10, 0.4 are 4, so the pair runs at
        # 2, which is 0.4 of far's 5.
        (2.5, (0.8, 0.4), (2.5, 5.0)),
        # 0.1 of far's 10 are 1, less than 0.8 of near's 2.5: for near's tier of 1.25 that is 0.8.
        (2.5, (0.8, 0.1), (1.25, 10.0)),
        (2.5, (0.5, 0.5), (2.5, 2.5)),
        # A network narrower than all cards limits both.
        (1.0, (0.8, 0.4), (1.0, 1.0)),
    ],
)
def test_a_tier_has_the_rate_of_its_slowest_end(
    rate: float, fractions: tuple[float, float], seen: tuple[float, float]
) -> None:
    cluster = mixed(rate, fractions)
    tiers = [tier_of_pool(pool, cluster) for pool in pools_of(cluster)]
    assert [tier.bytes_per_s for tier in tiers] == pytest.approx(seen)
    assert [tier.flow_bytes_per_s for tier in tiers] == pytest.approx([4 * one for one in seen])


def test_a_fabric_inside_nodes_is_unchanged() -> None:
    cluster = mixed(2.5, (0.8, 0.4))
    inside = replace(cluster, tiers=(replace(cluster.tiers[0], is_network=False),))
    assert tier_of_pool(pools_of(inside)[1], inside) == inside.tiers[0]
