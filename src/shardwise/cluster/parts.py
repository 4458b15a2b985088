"""Parts of a cluster that a job may use: some devices of one node, or some whole nodes of each pool.

Parts and multiples of a cluster: the same nodes, fewer or more of them; tiers keep their figures.

Pools: the alike nodes of a mixed cluster, and the clusters that some of them make up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from shardwise.cluster.cluster import Cluster, Node, Tier, node_runs
from shardwise.cluster.device import Device
from shardwise.cluster.groups import NodeGroups, default_tiers_in_groups, inter_node_tiers, with_spans
from shardwise.cluster.tiers import default_tiers, network_figures
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which nodes a part has: how many of each pool; only some `devices` of one node where that is given."""

    nodes: tuple[int, ...]
    devices: int | None = None

    @property
    def pools(self) -> tuple[int, ...]:
        """The places of the pools that it has nodes of."""
        return tuple(place for place, count in enumerate(self.nodes) if count)


class Parts:
    """The parts of one cluster. Nodes of a pool are taken in tree order: those groups of the network first
    that have most of the pool's nodes, and within a group the nodes in the order of the file."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pools: tuple[Pool, ...] = pools_of(cluster)

    @property
    def whole(self) -> Selection:
        """The cluster itself."""
        return Selection(nodes=tuple(pool.nodes for pool in self.pools))

    def within_a_node(self, pool: int) -> Iterator[Selection]:
        """Fewer devices of one node of the pool than it has."""
        nodes = tuple(int(place == pool) for place in range(len(self.pools)))
        for devices in range(1, self.pools[pool].node.devices):
            yield Selection(nodes=nodes, devices=devices)

    def devices_of(self, part: Selection) -> int:
        """Devices of the part."""
        if part.devices is not None:
            return part.devices
        return sum(count * pool.node.devices for count, pool in zip(part.nodes, self.pools, strict=True))

    def price_of(self, part: Selection) -> float | None:
        """USD per hour of all nodes of the part, also of one used in part; None where one has no price."""
        each = [(self.pools[place].node.price_usd_per_hour, part.nodes[place]) for place in part.pools]
        prices = [None if price is None else price * count for price, count in each]
        return None if None in prices else sum(price for price in prices if price is not None)

    def cluster_of(self, part: Selection) -> Cluster:
        """The part as a cluster of its own; a node used in part keeps its cards, host memory and price."""
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
        """The places of the part's nodes among the nodes of the cluster, ascending."""
        chosen = (places[:count] for places, count in zip(self._in_tree_order, part.nodes, strict=True))
        return tuple(sorted(place for places in chosen for place in places))

    @cached_property
    def _in_tree_order(self) -> tuple[tuple[int, ...], ...]:
        """The places of the nodes of each pool."""
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
