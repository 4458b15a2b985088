"""Pools of alike nodes, and the clusters that unions of them make up."""

from __future__ import annotations

from pathlib import Path

from shardwise.cluster import cluster_of_pools, load_cluster, pools_of

GIVEN = """\
nodes:
  - {device: A100-80G, count: 2, devices: 8}
  - {device: A100-80G, count: 1, devices: 8, speed: 0.8}
  - {device: V100-16G, count: 2, devices: 4}
tiers:
  - {name: inside, span: 4, bandwidth: 100GB/s, latency: 2us}
  - {name: room, bandwidth: 1GB/s, latency: 9us, network: true}
"""


def test_alike_nodes_are_one_pool_wherever_they_stand() -> None:
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


def test_customary_tiers_are_those_of_the_nodes_that_are_left() -> None:
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
