"""The link graph of a cluster (`link_graph`) and the route between two devices (`route`).

Vertices are devices `d3`, scale-up switches `u0`, nodes `n0` (their host and network cards) and network
switches `s1g0` (tier 1, group 0). A link's name is `source>target`. The graph has the links of the cluster's
file, or else links that follow from its tiers, each in both directions:

- from a device to its scale-up switch, at its scale-up bandwidth;
- from a device to its node, at the bandwidth through the network cards of a device that sends alone, or of
  its host link where that is the fabric inside the node (bridged pairs);
- from a node to its network switch, at the bandwidth of all its network cards, which its devices share;
- from a switch of one network tier to a switch of the next, at the bandwidth that its devices have there.

A tier's one-way latency is divided among the links of its route, half up and half down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwise.cluster.cluster import Capacity, Cluster, Link, Node, node_runs
from shardwise.errors import ConfigError


def link_graph(cluster: Cluster) -> tuple[Link, ...]:
    """All links of the cluster: those of its file, else those that follow from its tiers (up before down).

    There are about two links per device and fabric. `route` does not need the graph.
    """
    return cluster.links or tuple(_links_of_tiers(Fabric.of(cluster)))


def route(cluster: Cluster, source: int, target: int) -> tuple[str, ...]:
    """Names of the links from device `source` to device `target` (ranks), in order; empty where they are
    equal.

    The route uses the innermost fabric that has both devices. In a given link graph it has the fewest links,
    then the least latency, then the first names. Raises ConfigError for ranks outside the cluster and where
    there is no route.
    """
    for rank in (source, target):
        if not 0 <= rank < cluster.devices:
            allowed = f"0 to {cluster.devices - 1}"
            raise ConfigError("is not a rank of the cluster", found=str(rank), allowed=allowed)
    if source == target:
        return ()
    if cluster.links:
        return _shortest_route(cluster.links, f"d{source}", f"d{target}")
    fabric = Fabric.of(cluster)
    up, down = fabric.path_up(source, target), fabric.path_up(target, source)
    climbing = [f"{a}>{b}" for a, b in pairwise(up)]
    falling = [f"{b}>{a}" for a, b in pairwise(down)]
    return (*climbing, *reversed(falling))


@dataclass(frozen=True, slots=True)
class Fabric:
    """The tiers of a cluster by kind (scale-up, node, network), with the first rank of every node."""

    cluster: Cluster
    first_ranks: tuple[int, ...]
    has_scale_up: bool
    scale_up_span: int
    """Devices of a scale-up group; 0 where a group is a node."""
    network: tuple[int, ...]
    """Indices of the network tiers, innermost first."""

    @staticmethod
    def of(cluster: Cluster) -> Fabric:
        firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))[:-1]
        largest = max(node.devices for node in cluster.nodes)
        tiers = cluster.tiers
        local = [tier for tier in tiers if not tier.is_network]
        network = tuple(index for index, tier in enumerate(tiers) if tier.is_network)
        is_mixed = any(node.scale_up_bytes_per_s is not None for node, _ in node_runs(cluster.nodes))
        are_equal = len({node.devices for node, _ in node_runs(cluster.nodes)}) == 1
        is_own = bool(local) and (are_equal or len(local) > 1 or local[0].span > largest)
        span = local[0].span if is_own and not is_mixed else 0
        return Fabric(cluster, firsts, bool(local), span, network)

    def node_of(self, rank: int) -> int:
        return bisect_right(self.first_ranks, rank) - 1

    def scale_up_group(self, rank: int) -> int:
        return rank // self.scale_up_span if self.scale_up_span else self.node_of(rank)

    def switch(self, tier: int, rank: int) -> str:
        return f"s{tier}g{rank // self.cluster.tiers[tier].span}"

    def path_up(self, rank: int, other: int) -> list[str]:
        """Vertices from device `rank` up to the lowest vertex that it shares with device `other`."""
        if self.has_scale_up and self.scale_up_group(rank) == self.scale_up_group(other):
            return [f"d{rank}", f"u{self.scale_up_group(rank)}"]
        path = [f"d{rank}", f"n{self.node_of(rank)}"]
        if self.node_of(rank) == self.node_of(other):
            return path
        for tier in self.network:
            path.append(self.switch(tier, rank))
            if path[-1] == self.switch(tier, other):
                break
        return path


def _links_of_tiers(fabric: Fabric) -> Iterator[Link]:
    cluster = fabric.cluster
    innermost = cluster.tiers[0]
    for index, node in enumerate(cluster.nodes):
        first = fabric.first_ranks[index]
        scale_up = node.scale_up_bytes_per_s or innermost.flow_bytes_per_s
        for rank in range(first, first + node.devices):
            group = fabric.scale_up_group(rank)
            if fabric.has_scale_up:
                yield from _both(f"d{rank}", f"u{group}", scale_up, innermost.latency_s / 2)
            if len(cluster.tiers) > 1 or not fabric.has_scale_up:
                yield from _both(f"d{rank}", f"n{index}", *_to_node(fabric, node))
    if fabric.network:
        yield from _network_links(fabric)


def _to_node(fabric: Fabric, node: Node) -> tuple[float, float]:
    """Bandwidth and latency of the link between a device and its node."""
    inside = _node_tier_latency_s(fabric)
    network = [fabric.cluster.tiers[index].flow_bytes_per_s for index in fabric.network[:1]]
    alone = max(node.nic_bytes_per_s, *network) if network else 0.0
    return (alone if inside is None else max(node.host_link_bytes_per_s, alone)), (inside or 0.0) / 2


def _node_tier_latency_s(fabric: Fabric) -> float | None:
    """One-way latency of the tier of host links inside nodes; None where there is none."""
    return next((tier.latency_s for tier in fabric.cluster.tiers[1:] if not tier.is_network), None)


def _network_links(fabric: Fabric) -> Iterator[Link]:
    cluster = fabric.cluster
    lowest = fabric.network[0]
    half = max(cluster.tiers[lowest].latency_s - (_node_tier_latency_s(fabric) or 0.0), 0.0) / 2
    for index, node in enumerate(cluster.nodes):
        switch = fabric.switch(lowest, fabric.first_ranks[index])
        yield from _both(f"n{index}", switch, node.nics * node.nic_bytes_per_s, half)
    for below, above in pairwise(fabric.network):
        span = cluster.tiers[below].span
        extra = max(cluster.tiers[above].latency_s - cluster.tiers[below].latency_s, 0.0) / 2
        for first in range(0, cluster.devices, span):
            members = min(span, cluster.devices - first)
            rate = cluster.tiers[above].bytes_per_s * members
            yield from _both(fabric.switch(below, first), fabric.switch(above, first), rate, extra)


def _both(low: str, high: str, bytes_per_s: float, latency_s: float) -> tuple[Link, Link]:
    capacity = Capacity.constant(bytes_per_s)
    up = Link(name=f"{low}>{high}", source=low, target=high, capacity=capacity, latency_s=latency_s)
    down = Link(name=f"{high}>{low}", source=high, target=low, capacity=capacity, latency_s=latency_s)
    return up, down


def _shortest_route(links: tuple[Link, ...], source: str, target: str) -> tuple[str, ...]:
    outgoing: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        outgoing[link.source].append(link)
    best: dict[str, tuple[int, float, tuple[str, ...]]] = {source: (0, 0.0, ())}
    queue = deque([source])
    while queue:
        vertex = queue.popleft()
        hops, latency, names = best[vertex]
        if target in best and hops >= best[target][0]:
            break
        for link in outgoing[vertex]:
            found = (hops + 1, latency + link.latency_s, (*names, link.name))
            if link.target not in best:
                queue.append(link.target)
            if link.target not in best or found < best[link.target]:
                best[link.target] = found
    if target not in best:
        raise ConfigError("has no route between devices", key="links", found=f"{source} to {target}")
    return best[target][2]
