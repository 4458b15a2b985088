"""Parts and multiples of a cluster: the same nodes, fewer or more of them; tiers keep their figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from shardwise.cluster.cluster import Cluster, Node, Tier, node_runs
from shardwise.cluster.groups import NodeGroups, default_tiers_in_groups, inter_node_tiers, with_spans
from shardwise.cluster.tiers import default_tiers
from shardwise.errors import ConfigError

MAX_NAME = 150


def part_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Devices of every part of `cluster` that a job may use, ascending: any number on its first node, or any
    number of its first nodes as a whole."""
    first = cluster.nodes[0].devices
    whole = accumulate(node.devices for node in cluster.nodes)
    return tuple(sorted({*range(1, first + 1), *whole}))


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """The first `devices` of `cluster`, one of its `part_sizes`. A node used in part keeps its cards, its
    host memory and its price: it is there for this job alone. ConfigError for any other number."""
    if devices == cluster.devices:
        return cluster
    if devices not in part_sizes(cluster):
        raise _no_part(cluster, devices)
    if devices <= cluster.nodes[0].devices:
        nodes: tuple[Node, ...] = (replace(cluster.nodes[0], devices=devices),)
    else:
        counts = list(accumulate(node.devices for node in cluster.nodes))
        nodes = cluster.nodes[: counts.index(devices) + 1]
    is_default = cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes))
    if is_default and not cluster.is_uniform:  # the tiers are not as slow as those of nodes left out
        return with_nodes(cluster, nodes, default_tiers(cluster.classes, node_runs(nodes)))
    return with_nodes(cluster, nodes, clipped_tiers(cluster.tiers, devices))


def multiplied(cluster: Cluster, factor: int) -> Cluster:
    """The same cluster with `factor` times as many of its nodes."""
    return _enlarged(cluster, cluster.nodes * factor)


def resized(cluster: Cluster, devices: int) -> Cluster:
    """A part of `cluster`, or the cluster with more of its last node. ConfigError where so many devices are
    neither."""
    if devices <= cluster.devices:
        return part_of(cluster, devices)
    last = cluster.nodes[-1]
    more, left = divmod(devices - cluster.devices, last.devices)
    if left:
        raise _no_part(cluster, devices)
    return _enlarged(cluster, (*cluster.nodes, *[last] * more))


def _enlarged(cluster: Cluster, nodes: tuple[Node, ...]) -> Cluster:
    """The cluster with more nodes: customary tiers stay customary, otherwise the outermost network spans
    all."""
    if cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes)):
        return with_nodes(cluster, nodes, default_tiers(cluster.classes, node_runs(nodes)))
    devices = sum(node.devices for node in nodes)
    outermost = cluster.tiers[-1]
    if outermost.is_network:
        return with_nodes(cluster, nodes, (*cluster.tiers[:-1], replace(outermost, span=devices)))
    return with_nodes(cluster, nodes, (*cluster.tiers, _default_network(cluster, devices)))


def _default_network(cluster: Cluster, devices: int) -> Tier:
    """The network that the first node's cards make, where the cluster has none yet."""
    node, outermost = cluster.nodes[0], cluster.tiers[-1]
    device = cluster.classes[node.device_class]
    return replace(
        outermost,
        name=device.scale_out_name,
        span=devices,
        bytes_per_s=node.nics * node.nic_bytes_per_s / node.devices,
        flow_bytes_per_s=node.nic_bytes_per_s,
        latency_s=device.scale_out_latency_s,
        in_switch_reduction=False,
        is_network=True,
        part_shares=(),
    )


def cluster_of_nodes(cluster: Cluster, places: Sequence[int]) -> Cluster:
    """The part of `cluster` that the nodes at these places make up, in their order; the cluster itself where
    they are alike to all of its nodes, one by one, and lie together as those do.

    Customary tiers are those of the nodes that are left; given ones keep their figures. Groups of either hold
    no other nodes than the cluster's do.
    """
    nodes = tuple(cluster.nodes[place] for place in places)
    groups = NodeGroups(cluster)
    spans = groups.common_spans(places)
    if _unnamed(nodes) == _unnamed(cluster.nodes) and spans == groups.common_spans(range(len(cluster.nodes))):
        return cluster
    if cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes)):
        return with_nodes(cluster, nodes, default_tiers_in_groups(cluster.classes, nodes, spans))
    tiers = with_spans(cluster.tiers, dict(zip(inter_node_tiers(cluster), spans, strict=True)))
    return with_nodes(cluster, nodes, clipped_tiers(tiers, sum(node.devices for node in nodes)))


def _unnamed(nodes: Iterable[Node]) -> list[Node]:
    return [replace(node, name="") for node in nodes]


def clipped_tiers(tiers: Iterable[Tier], devices: int) -> tuple[Tier, ...]:
    """The tiers that `devices` consecutive devices still have, the last one spanning them all."""
    remaining: list[Tier] = []
    for tier in tiers:
        remaining.append(replace(tier, span=min(tier.span, devices)))
        if tier.span >= devices:
            break
    return tuple(remaining)


def with_nodes(cluster: Cluster, nodes: tuple[Node, ...], tiers: tuple[Tier, ...]) -> Cluster:
    """The cluster with other nodes. A link graph names devices that may be gone: the tiers stand for it."""
    devices = sum(node.devices for node in nodes)
    used = {node.device_class for node in nodes}
    return replace(
        cluster,
        name=f"{devices:,} {'device' if devices == 1 else 'devices'} of {cluster.name[:MAX_NAME]}",
        classes={name: device for name, device in cluster.classes.items() if name in used},
        nodes=nodes,
        tiers=tiers,
        links=(),
        is_without_links=cluster.has_links_as_tiers,
    )


def _no_part(cluster: Cluster, devices: int) -> ConfigError:
    allowed = f"1 to {cluster.nodes[0].devices} on one node, or whole nodes"
    return ConfigError(
        "is no part or multiple of the cluster", key="devices", found=str(devices), allowed=allowed
    )
