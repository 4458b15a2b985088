"""The clusters that shardwise ships by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise.cluster
from shardwise.cluster import load_cluster, pools_of
from shardwise.cluster.load import cluster_names
from shardwise.errors import ConfigError

# By pool: name, nodes, devices of a node, bytes per second of all cards of a node.
POOLS = {
    "two-classes": [("A100-80G", 4, 8, 8 * 200e9 / 8), ("V100-32G", 4, 8, 4 * 100e9 / 8)],
    "three-classes": [
        ("H100-SXM", 2, 8, 8 * 400e9 / 8), ("A100-80G", 2, 8, 8 * 200e9 / 8),
        ("V100-32G", 2, 8, 4 * 100e9 / 8),
    ],
    "two-sites-10g": [("H100-SXM", 2, 8, 8 * 200e9 / 8), ("A100-80G", 2, 8, 8 * 200e9 / 8)],
    "two-sites-1g": [("H100-SXM", 2, 8, 8 * 200e9 / 8), ("A100-80G", 2, 8, 8 * 200e9 / 8)],
    "fast-slow-racks": [("H100-SXM", 4, 8, 8 * 400e9 / 8), ("A100-80G", 4, 8, 2 * 25e9 / 8)],
    "spot-mix": [
        ("V100-16G", 2, 4, 10e9 / 8), ("A10G", 4, 4, 40e9 / 8), ("L4", 2, 4, 40e9 / 8),
        ("T4", 4, 4, 50e9 / 8),
    ],
    "slow-node": [("8xH100-SXM", 7, 8, 8 * 400e9 / 8), ("slow node at 0.6", 1, 8, 8 * 400e9 / 8)],
}  # fmt: skip


def test_every_shipped_cluster_is_known_here() -> None:
    assert set(cluster_names()) == set(POOLS)


@pytest.mark.parametrize("name", sorted(POOLS))
def test_a_name_stands_for_its_pools_and_cards(name: str) -> None:
    cluster = load_cluster(name)
    found = [
        (pool.name, pool.nodes, pool.node.devices, pool.node.nics * pool.node.nic_bytes_per_s)
        for pool in pools_of(cluster)
    ]
    assert found == POOLS[name] and cluster.name == name


@pytest.mark.parametrize(("name", "rate"), [("two-sites-10g", 10e9 / 8), ("two-sites-1g", 1e9 / 8)])
def test_links_between_sites_have_the_rate_of_the_named_cluster(name: str, rate: float) -> None:
    tier = load_cluster(name).tiers[-1]
    assert (tier.name, tier.bytes_per_s, tier.latency_s) == ("WAN", rate, 11e-3)


@pytest.mark.parametrize("name", sorted(POOLS))
def test_every_file_names_the_source_of_its_figures(name: str) -> None:
    path = Path(shardwise.cluster.__file__).with_name("data") / "clusters" / f"{name}.yaml"
    head = [
        line.removeprefix("#").strip()
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("#")
    ]
    assert any(word in " ".join(head) for word in ("data sheet", "user guide"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="neither a cluster nor a file") as caught:
        load_cluster("three-glasses")
    assert "three-classes" in str(caught.value.allowed)


def test_a_named_cluster_refuses_another_network() -> None:
    with pytest.raises(ConfigError, match="is for shorthands"):
        load_cluster("spot-mix", inter_node="100Gb/s")
