"""Which links lie between nodes, and how long bytes take over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.cluster import Cluster, Link, link_graph, route
from shardwise.replan.situation import Situation

Pair = tuple[str, str]
"""A node that sends ("" is the storage of checkpoints, behind the network) and one that receives."""


class LinkRoutes:
    """The ways between the nodes of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))
        self._network = [place for place, tier in enumerate(cluster.tiers) if tier.is_network]
        self._links: dict[str, Link] = {}
        self._route = lru_cache(maxsize=1 << 16)(self._route_of)

    def bytes_per_link(self, sent_bytes: Mapping[Pair, float]) -> dict[str, float]:
        """Bytes over every link between nodes, by its name."""
        total: dict[str, float] = defaultdict(float)
        for (source, target), nbytes in sent_bytes.items():
            if source != target and nbytes > 0.0:
                for name in self._route(source, target):
                    total[name] += nbytes
        return dict(sorted(total.items()))

    def seconds(self, links: Mapping[str, float], situation: Situation) -> float:
        """Until the busiest link is done, at the bandwidth that its nodes have now."""
        longest_s = 0.0
        for name, nbytes in links.items():
            link = self._named(name)
            ends = [end for end in (link.source, link.target) if end in situation.states]
            share = min((situation.states[end].network for end in ends), default=1.0)
            longest_s = max(longest_s, nbytes / (link.capacity.at(0.0) * share))
        return longest_s

    def inter_site_s(self, sent_bytes: Mapping[Pair, float], situation: Situation) -> float:
        """Until what goes from site to site is done, at the bandwidth between them now."""
        longest_s = 0.0
        for inter_site in situation.inter_site:
            for here, there in ((inter_site.first, inter_site.second), (inter_site.second, inter_site.first)):
                nbytes = sum(size for (a, b), size in sent_bytes.items() if a in here and b in there)
                if nbytes and inter_site.bytes_per_s is not None:
                    longest_s = max(longest_s, nbytes / inter_site.bytes_per_s)
        return longest_s

    def _named(self, name: str) -> Link:
        if not self._links:
            self._links = {link.name: link for link in link_graph(self._cluster)}
        return self._links[name]

    def _route_of(self, source: str, target: str) -> tuple[str, ...]:
        if self._cluster.links:
            return self._given(source, target)
        up, down = self._path_to_root(source or target), self._path_to_root(target)
        meet = next((place for place, vertex in enumerate(up) if vertex in down), len(up) - 1)
        rise = [] if not source else [f"{a}>{b}" for a, b in pairwise(up[: meet + 1])]
        fall = down if not source else down[: down.index(up[meet]) + 1]
        return (*rise, *(f"{b}>{a}" for a, b in reversed(list(pairwise(fall)))))

    def _path_to_root(self, name: str) -> list[str]:
        """Vertices from a node up to the outermost switch."""
        rank = self._firsts[int(name[1:])]
        tiers = self._cluster.tiers
        return [name, *(f"s{place}g{rank // tiers[place].span}" for place in self._network)]

    def _given(self, source: str, target: str) -> tuple[str, ...]:
        """In a given link graph, from first device to first device; from storage, what the last link is."""
        first = self._firsts[int(target[1:])]
        if source:
            return route(self._cluster, self._firsts[int(source[1:])], first)
        other = 0 if first else self._cluster.devices - 1
        return route(self._cluster, other, first)[-1:]
