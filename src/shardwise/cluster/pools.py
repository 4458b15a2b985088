"""Pools: the alike nodes of a mixed cluster, and the clusters that some of them make up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.cluster.cluster import Cluster, Node, Tier, node_runs
from shardwise.cluster.device import Device
from shardwise.cluster.resize import MAX_NAME, cluster_of_nodes
from shardwise.cluster.tiers import network_figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All nodes of a cluster that are the same record but for their name: one class, one speed, the same
    cards."""

    name: str
    node: Node
    nodes: int

    @property
    def devices(self) -> int:
        """Devices of all its nodes."""
        return self.node.devices * self.nodes

    def contains(self, node: Node) -> bool:
        """Whether the node is one of the pool's."""
        return _key(node) == _key(self.node)


def pools_of(cluster: Cluster) -> tuple[Pool, ...]:
    """The pools of `cluster` in the order in which their first nodes stand; one where all nodes are alike.

    A pool is named by its device class where no other pool has that, else by its node too.
    """
    counts: dict[Node, int] = {}
    first: dict[Node, Node] = {}
    for node, count in node_runs(cluster.nodes):
        counts[_key(node)] = counts.get(_key(node), 0) + count
        first.setdefault(_key(node), node)
    classes = [key.device_class for key in counts]
    names: list[str] = []
    for key in counts:
        name = key.device_class if classes.count(key.device_class) == 1 else _label(first[key])
        while name in names:
            name += "'"
        names.append(name)
    return tuple(
        Pool(name=name, node=first[key], nodes=count)
        for name, (key, count) in zip(names, counts.items(), strict=True)
    )


def _label(node: Node) -> str:
    return node.name if node.speed == 1.0 else f"{node.name} at {node.speed:g}"


def cluster_of_pools(cluster: Cluster, pools: Iterable[Pool]) -> Cluster:
    """The part of `cluster` that these of its pools make up, all of their nodes, in the order of the cluster.

    Tiers are those of `cluster_of_nodes`, the last one spanning all devices.
    """
    selected = {_key(pool.node): pool.name for pool in pools}
    places = [place for place, node in enumerate(cluster.nodes) if _key(node) in selected]
    if len(places) == len(cluster.nodes):
        return cluster
    part = cluster_of_nodes(cluster, places)
    tiers = (*part.tiers[:-1], replace(part.tiers[-1], span=part.devices))
    return replace(part, tiers=tiers, name=f"{' + '.join(selected.values())} of {cluster.name[:MAX_NAME]}")


def tier_of_pool(pool: Pool, cluster: Cluster) -> Tier:
    """The outermost tier of `cluster` with the figures at which the devices of `pool`, one of its pools, go
    at the pace of the slowest end.

    A tier has the weakest cards, and collectives reach a fraction of them that differs by device: what the
    weakest cards carry is not what the least fraction of them is. 1.25 GB/s of which 0.75 are reached and
    6.25 of which 0.4 are reach 0.94 together; to devices that reach 0.4 of their cards that is a tier of
    2.34 GB/s. Where links are narrower than all cards, every end has its fraction of the link.
    """
    tier = cluster.tiers[-1]
    nodes = [one.node for one in pools_of(cluster)]
    cards = [network_figures([node]).bytes_per_s for node in nodes]
    if not tier.is_network or tier.bytes_per_s < min(cards) * (1 - 1e-9):
        return tier
    reached = min(
        _fraction(cluster.classes[node.device_class]) * card for node, card in zip(nodes, cards, strict=True)
    )
    rate = reached / _fraction(cluster.classes[pool.node.device_class])
    return replace(tier, bytes_per_s=rate, flow_bytes_per_s=tier.flow_bytes_per_s * rate / tier.bytes_per_s)


def _fraction(device: Device) -> float:
    return device.efficiency.scale_out.fraction


def _key(node: Node) -> Node:
    return replace(node, name="")
