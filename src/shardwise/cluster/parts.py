"""Parts of a cluster that a job may use: some devices of one node, or some whole nodes of each pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.cluster.cluster import Cluster, Node
from shardwise.cluster.groups import NodeGroups
from shardwise.cluster.pools import Pool, cluster_of_pools, pools_of
from shardwise.cluster.resize import cluster_of_nodes, part_of


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
