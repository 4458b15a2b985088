"""Parts and multiples of a cluster: their tiers, nodes and prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster import (
    cluster_from_record,
    cluster_record,
    load_cluster,
    multiplied,
    part_of,
    part_sizes,
    resized,
)
from shardwise.errors import ConfigError


def test_parts_are_some_of_a_node_or_whole_nodes() -> None:
    assert part_sizes(load_cluster("3x4xH100-SXM")) == (1, 2, 3, 4, 8, 12)
    # The last node of a count is smaller: 8 + 8 + 4.
    assert part_sizes(load_cluster("20xH100-SXM")) == (*range(1, 9), 16, 20)
    # Mixed clusters: whole nodes in listed order, or some of the first.
    assert part_sizes(load_cluster("1x2xA100-80G+2x4xV100-32G")) == (1, 2, 6, 10)


def test_a_part_of_a_node_keeps_the_node() -> None:
    whole = load_cluster("2x8xH100-SXM")
    part = part_of(whole, 3)
    assert (part.devices, len(part.nodes), part.name) == (3, 1, "3 devices of 2x8xH100-SXM")
    (node,) = part.nodes
    assert (node.nics, node.host_memory_bytes) == (whole.nodes[0].nics, whole.nodes[0].host_memory_bytes)
    assert part.price_usd_per_hour == whole.nodes[0].price_usd_per_hour
    # No network is left, and NVLink is as fast as before.
    assert [(tier.span, tier.bytes_per_s) for tier in part.tiers] == [(3, whole.tiers[0].bytes_per_s)]


def test_whole_nodes_keep_their_tiers() -> None:
    whole = load_cluster("4x8xH100-SXM")
    part = part_of(whole, 16)
    assert part.nodes == whole.nodes[:2]
    assert [tier.span for tier in part.tiers] == [8, 16]
    assert replace(part.tiers[1], span=32) == whole.tiers[1]
    assert part_of(whole, 32) is whole


def test_a_part_of_a_mixed_cluster_is_not_slowed_by_omitted_nodes() -> None:
    mixed = load_cluster("1x4xA100-80G+2x4xA10G")
    assert part_of(mixed, 4).tiers == load_cluster("1x4xA100-80G").tiers
    assert part_of(mixed, 4).tiers[0].bytes_per_s > mixed.tiers[0].bytes_per_s
    assert part_of(mixed, 8).tiers == load_cluster("1x4xA100-80G+1x4xA10G").tiers


def test_a_part_is_a_cluster_that_can_be_written_and_read() -> None:
    part = part_of(load_cluster("1x2xA100-80G+2x4xV100-32G"), 6)
    assert list(part.classes) == ["A100-80G", "V100-32G"]
    assert cluster_from_record(cluster_record(part)) == part
    first = part_of(load_cluster("1x2xA100-80G+2x4xV100-32G"), 2)
    assert list(first.classes) == ["A100-80G"]


@pytest.mark.parametrize("devices", [0, 9, 15, 17])
def test_other_numbers_of_devices_are_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match="not a part or multiple"):
        part_of(load_cluster("2x8xH100-SXM"), devices)


def test_multiples_are_the_default_cluster_of_that_size() -> None:
    """One node has no network; two of them have that of the shorthand for two."""
    for small, factor, large in (("1x8xH100-SXM", 2, "2x8xH100-SXM"), ("4x4xGB200", 8, "32x4xGB200")):
        found, expected = multiplied(load_cluster(small), factor), load_cluster(large)
        assert found.tiers == expected.tiers
        assert [node.devices for node in found.nodes] == [node.devices for node in expected.nodes]


def test_a_changed_network_stays_changed_after_a_resize() -> None:
    slow = load_cluster("2x8xH100-SXM")
    network = replace(slow.tiers[1], bytes_per_s=1e9, flow_bytes_per_s=1e9)
    found = multiplied(replace(slow, tiers=(slow.tiers[0], network)), 3)
    assert found.tiers == (slow.tiers[0], replace(network, span=48))


def test_resized_takes_parts_and_adds_nodes() -> None:
    cluster = load_cluster("2x8xH100-SXM")
    assert resized(cluster, 4).devices == 4
    assert len(resized(cluster, 40).nodes) == 5
    with pytest.raises(ConfigError):
        resized(cluster, 20)
