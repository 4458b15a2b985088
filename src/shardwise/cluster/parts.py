"""Parts, multiples and pools of a cluster.

A part has some devices of one node, or some whole nodes of each pool (`Parts`, `Selection`, `part_of`). A
multiple has more nodes of the same kind (`multiplied`, `resized`). A `Pool` has all equal nodes of a mixed
cluster. Tiers keep their bandwidth and latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from shardwise.cluster.cluster import Cluster, Node, Tier, node_runs
from shardwise.cluster.device import Device
from shardwise.cluster.groups import NodeGroups, default_tiers_in_groups, inter_node_tiers, with_spans
from shardwise.cluster.tiers import default_tiers, network_figures
from shardwise.errors import ConfigError

# Parts and multiples
MAX_NAME = 150
"""Most characters of a cluster's name in the name of its part."""


def part_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of devices of all parts of `cluster` that a job may use, in ascending order.

    A part has any number of devices of the first node, or any number of whole first nodes."""
    first = cluster.nodes[0].devices
    whole = accumulate(node.devices for node in cluster.nodes)
    return tuple(sorted({*range(1, first + 1), *whole}))


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """The first `devices` devices of `cluster`; the number is one of its `part_sizes`.

    A node that is used in part keeps its network cards, host memory and price, since no other job uses it.
    Raises ConfigError for other numbers."""
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
    if is_default and not cluster.is_uniform:  # the nodes that are left out do not slow the tiers
        return with_nodes(cluster, nodes, default_tiers(cluster.classes, node_runs(nodes)))
    return with_nodes(cluster, nodes, clipped_tiers(cluster.tiers, devices))


def multiplied(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with `factor` times as many nodes."""
    return _enlarged(cluster, cluster.nodes * factor)


def resized(cluster: Cluster, devices: int) -> Cluster:
    """The part of `cluster` with this number of devices, or the cluster with more nodes like its last.

    Raises ConfigError where neither has that number."""
    if devices <= cluster.devices:
        return part_of(cluster, devices)
    last = cluster.nodes[-1]
    more, left = divmod(devices - cluster.devices, last.devices)
    if left:
        raise _no_part(cluster, devices)
    return _enlarged(cluster, (*cluster.nodes, *[last] * more))


def _enlarged(cluster: Cluster, nodes: tuple[Node, ...]) -> Cluster:
    """The cluster with more nodes. Default tiers become those of all nodes; else the outermost network spans
    all nodes."""
    if cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes)):
        return with_nodes(cluster, nodes, default_tiers(cluster.classes, node_runs(nodes)))
    devices = sum(node.devices for node in nodes)
    outermost = cluster.tiers[-1]
    if outermost.is_network:
        return with_nodes(cluster, nodes, (*cluster.tiers[:-1], replace(outermost, span=devices)))
    return with_nodes(cluster, nodes, (*cluster.tiers, _default_network(cluster, devices)))


def _default_network(cluster: Cluster, devices: int) -> Tier:
    """A network tier with the network cards of the first node, for a cluster without a network tier."""
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
    """The part of `cluster` with the nodes at these indices, in their order.

    It is the cluster itself where each node equals the cluster's node at its position and the groups of tiers
    are the same. Default tiers become those of the selected nodes; given tiers keep their bandwidth and
    latency. No group joins nodes that the cluster has in different groups.
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
    return [_key(node) for node in nodes]


def clipped_tiers(tiers: Iterable[Tier], devices: int) -> tuple[Tier, ...]:
    """The tiers of the first `devices` devices; the last one spans them all."""
    remaining: list[Tier] = []
    for tier in tiers:
        remaining.append(replace(tier, span=min(tier.span, devices)))
        if tier.span >= devices:
            break
    return tuple(remaining)


def with_nodes(cluster: Cluster, nodes: tuple[Node, ...], tiers: tuple[Tier, ...]) -> Cluster:
    """The cluster with other nodes and tiers. Links are left out, since their devices may not exist."""
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
        "is not a part or multiple of the cluster", key="devices", found=str(devices), allowed=allowed
    )


# Pools
@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All nodes of a cluster that are equal apart from their name: same class, speed and network cards."""

    name: str
    node: Node
    nodes: int

    @property
    def devices(self) -> int:
        """Number of devices of all its nodes."""
        return self.node.devices * self.nodes

    def contains(self, node: Node) -> bool:
        """Whether the node belongs to the pool."""
        return _key(node) == _key(self.node)


def pools_of(cluster: Cluster) -> tuple[Pool, ...]:
    """The pools of `cluster`, in the order of their first nodes; one pool where all nodes are equal.

    The name of a pool is its device class where no other pool has it, else the name of its node.
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
    """The part of `cluster` with all nodes of these pools, in the order of the cluster.

    Tiers are those of `cluster_of_nodes`; the last one spans all devices.
    """
    selected = {_key(pool.node): pool.name for pool in pools}
    places = [place for place, node in enumerate(cluster.nodes) if _key(node) in selected]
    if len(places) == len(cluster.nodes):
        return cluster
    part = cluster_of_nodes(cluster, places)
    tiers = (*part.tiers[:-1], replace(part.tiers[-1], span=part.devices))
    return replace(part, tiers=tiers, name=f"{' + '.join(selected.values())} of {cluster.name[:MAX_NAME]}")


def tier_of_pool(pool: Pool, cluster: Cluster) -> Tier:
    """The outermost tier of `cluster` as the cost model needs it for the devices of `pool`: with the
    bandwidth at which they reach the rate of the slowest pool.

    Collectives reach a fraction of the network cards that differs by device. So the slowest pool need not be
    the one with the slowest cards. Example: one pool reaches 0.75 of 1.25 GB/s (0.94 GB/s), the other 0.4 of
    6.25 GB/s (2.5 GB/s). Both go at 0.94 GB/s; for the second pool that is a tier of 2.34 GB/s. Where the
    tier has less bandwidth than the cards of every pool, each pool reaches its fraction of the tier.
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


@lru_cache(maxsize=1 << 16)
def _key(node: Node) -> Node:
    """The node without its name. Clusters of many pools ask it for each node and pool."""
    return replace(node, name="")


# Selections of nodes
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The nodes of a part: the number of nodes of each pool, or some `devices` of one node."""

    nodes: tuple[int, ...]
    devices: int | None = None

    @property
    def pools(self) -> tuple[int, ...]:
        """Indices of the pools with nodes in the part."""
        return tuple(place for place, count in enumerate(self.nodes) if count)


class Parts:
    """The parts of one cluster.

    Nodes of a pool are selected in tree order: first the network groups with most of the pool's nodes, and
    within a group in the order of the file."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pools: tuple[Pool, ...] = pools_of(cluster)

    @property
    def whole(self) -> Selection:
        """The selection of the whole cluster."""
        return Selection(nodes=tuple(pool.nodes for pool in self.pools))

    def within_a_node(self, pool: int) -> Iterator[Selection]:
        """All selections of some, but not all, devices of one node of the pool."""
        nodes = tuple(int(place == pool) for place in range(len(self.pools)))
        for devices in range(1, self.pools[pool].node.devices):
            yield Selection(nodes=nodes, devices=devices)

    def devices_of(self, part: Selection) -> int:
        """Number of devices of the part."""
        if part.devices is not None:
            return part.devices
        return sum(count * pool.node.devices for count, pool in zip(part.nodes, self.pools, strict=True))

    def price_of(self, part: Selection) -> float | None:
        """USD per hour of all nodes of the part; a node used in part counts in full. None where a node has no
        price."""
        each = [(self.pools[place].node.price_usd_per_hour, part.nodes[place]) for place in part.pools]
        prices = [None if price is None else price * count for price, count in each]
        return None if None in prices else sum(price for price in prices if price is not None)

    def cluster_of(self, part: Selection) -> Cluster:
        """The part as a cluster. A node used in part keeps its network cards, host memory and price."""
        if part == self.whole:
            return self.cluster
        if len(self.pools) == 1:
            return part_of(self.cluster, self.devices_of(part))
        chosen = [self.pools[place] for place in part.pools]
        if part.devices is not None:
            return part_of(cluster_of_pools(self.cluster, chosen), part.devices)
        if all(part.nodes[place] == self.pools[place].nodes for place in part.pools):
            return cluster_of_pools(self.cluster, chosen)
        return cluster_of_nodes(self.cluster, self.places_of(part))

    def places_of(self, part: Selection) -> tuple[int, ...]:
        """Indices of the part's nodes in the cluster, in ascending order."""
        chosen = (places[:count] for places, count in zip(self._in_tree_order, part.nodes, strict=True))
        return tuple(sorted(place for places in chosen for place in places))

    @cached_property
    def _in_tree_order(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the nodes of each pool, in tree order."""
        found = [list[int]() for _ in self.pools]
        pool_of: dict[int, int] = {}
        for place, node in enumerate(self.cluster.nodes):
            if id(node) not in pool_of:
                pool_of[id(node)] = self._pool_of(node)
            found[pool_of[id(node)]].append(place)
        if len(self.pools) == 1:
            return (tuple(found[0]),)
        groups = NodeGroups(self.cluster)
        return tuple(tuple(groups.ordered(places, lambda place: (place,))) for places in found)

    def _pool_of(self, node: Node) -> int:
        return next(place for place, pool in enumerate(self.pools) if pool.contains(node))
