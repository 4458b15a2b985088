"""The conditions of a cluster at an instant of a trace, the states of its nodes, and clusters of such nodes.

`Conditions` collects events, `NodeView` derives a `NodeState` for every node, and `uniform_cluster` and
`current_cluster` build clusters from states. Shares of speed and bandwidth are rounded down to steps of 2 %
(`rounded_down`), and no link counts as faster than nominal. So plans never assume more than the cluster has,
and similar instants have equal states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from shardwise.cluster.cluster import Cluster, Link, Node, Tier, node_runs
from shardwise.cluster.events import (
    ClusterEvent,
    DeviceLost,
    EventTrace,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
)
from shardwise.cluster.groups import NodeGroups, default_tiers_in_groups, inter_node_tiers, with_spans
from shardwise.cluster.links import link_graph
from shardwise.cluster.parts import Pool, clipped_tiers, cluster_of_nodes, pools_of, with_nodes
from shardwise.cluster.tiers import default_tiers
from shardwise.errors import InternalError

SHARE_STEP = 1.02
"""Ratio of neighbouring shares after rounding (`rounded_down`)."""

Sites = tuple[str, str]
"""Two sites, in the order of their names."""

Key = TypeVar("Key", str, Sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions after the events up to an instant.

    `present` are the nodes in the cluster, and `noticed` those with a notice of preemption. The other fields
    have the speeds, rates (bytes/s) and one-way latencies that events changed."""

    present: frozenset[str]
    noticed: frozenset[str] = frozenset()
    speeds: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    latencies_s: Mapping[str, float] = field(default_factory=dict)
    site_rates: Mapping[Sites, float] = field(default_factory=dict)
    site_latencies_s: Mapping[Sites, float] = field(default_factory=dict)

    @staticmethod
    def at_start(trace: EventTrace) -> Conditions:
        """The conditions before the first event of a trace."""
        return Conditions(present=frozenset(f"n{index}" for index in range(trace.nodes)) - trace.absent)

    def after(self, event: ClusterEvent) -> Conditions:
        """The conditions from the event on. A node that joins has its nominal speed.

        `events_of_nodes` replaces lost devices by lost nodes, so a DeviceLost raises InternalError."""
        if isinstance(event, DeviceLost):
            raise InternalError(f"{event.device} is lost and not its node")
        if isinstance(event, NodeLost):
            return replace(self, present=self.present - {event.node}, noticed=self.noticed - {event.node})
        if isinstance(event, NodeJoined):
            remaining = {where: speed for where, speed in self.speeds.items() if where != event.node}
            return replace(self, present=self.present | {event.node}, speeds=remaining)
        if isinstance(event, Notice):
            return replace(self, noticed=self.noticed | {event.node})
        if isinstance(event, Slowdown):
            return replace(self, speeds=_put(self.speeds, event.where, event.speed))
        if event.sites is not None:
            first, second = sorted(event.sites)
            return replace(
                self,
                site_rates=_put(self.site_rates, (first, second), event.bytes_per_s),
                site_latencies_s=_put(self.site_latencies_s, (first, second), event.latency_s),
            )
        return replace(
            self,
            rates=_put(self.rates, event.link, event.bytes_per_s),
            latencies_s=_put(self.latencies_s, event.link, event.latency_s),
        )


def _put(values: Mapping[Key, float], key: Key | None, value: float | None) -> Mapping[Key, float]:
    return values if key is None or value is None else {**values, key: value}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NodeState:
    """The state of one node.

    `pool` is its index in `pools_of`. `speed` is the share of nominal speed that its slowest device has,
    `network` and `inside` are the shares of nominal bandwidth between nodes and inside the node (1 is
    nominal). `latency_s` is the least one-way latency to other nodes in seconds (0: that of the cluster).

    The other fields are set for nodes of an arrangement. `inter_site_share` is the share of its network cards
    that may send to other sites, and `inter_site_latency_s` the latency to them. `site_tiers` is the number
    of tiers over several nodes that lie within a site. `spans` are the devices of a group of each such tier
    in the arrangement, where they differ from the cluster's."""

    pool: int
    speed: float = 1.0
    network: float = 1.0
    inside: float = 1.0
    latency_s: float = 0.0
    inter_site_share: float = 1.0
    inter_site_latency_s: float = 0.0
    site_tiers: int = 0
    spans: tuple[int, ...] = ()


def rounded_down(share: float) -> float:
    """`share` rounded down to a power of SHARE_STEP; 0 and 1 stay."""
    return SHARE_STEP ** math.floor(math.log(share) / math.log(SHARE_STEP) + 1e-9) if share > 0.0 else 0.0


class NodeView:
    """Derives the states of a cluster's nodes from `Conditions`.

    A link with a device or a node at one end belongs to that node. A link between switches belongs to all
    nodes whose route up contains it, or to all nodes where the cluster's file gave links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pools: tuple[Pool, ...] = pools_of(cluster)
        self.groups = NodeGroups(cluster)
        keys = {replace(pool.node, name=""): place for place, pool in enumerate(self.pools)}
        self.pool_of = {f"n{index}": keys[replace(node, name="")] for index, node in enumerate(cluster.nodes)}
        self._node_of_rank = [index for index, node in enumerate(cluster.nodes) for _ in range(node.devices)]
        self._links: dict[str, Link] = {}
        self._same: dict[NodeState, NodeState] = {}
        self._spans = {f"s{place}": tier.span for place, tier in enumerate(cluster.tiers)}
        self._first_ranks = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))

    def states(self, conditions: Conditions) -> dict[str, NodeState]:
        """The states of present nodes with a speed and bandwidths above 0, in the order of the cluster."""
        speeds = self._speeds(conditions.speeds)
        network, inside = self._shares(conditions.rates)
        latency_s = self._latencies_s(conditions.latencies_s)
        found: dict[str, NodeState] = {}
        for name, pool in self.pool_of.items():
            if name not in conditions.present:
                continue
            state = NodeState(
                pool=pool,
                speed=rounded_down(min(speeds.get(name, 1.0), 1.0)),
                network=rounded_down(network.get(name, 1.0)),
                inside=rounded_down(inside.get(name, 1.0)),
                latency_s=latency_s.get(name, 0.0),
            )
            if state.speed and state.network and state.inside:
                found[name] = self._same.setdefault(state, state)
        return found

    def _speeds(self, speeds: Mapping[str, float]) -> dict[str, float]:
        """The speed of the slowest device of every node whose speed an event changed."""
        nodes = {where: speed for where, speed in speeds.items() if where[0] == "n"}
        slowest: dict[str, dict[int, float]] = {}
        for where, speed in speeds.items():
            if where[0] == "d":
                rank = int(where[1:])
                slowest.setdefault(f"n{self._node_of_rank[rank]}", {})[rank] = speed
        for name, devices in slowest.items():
            every = self.cluster.nodes[int(name[1:])].devices
            least = min(devices.values()) if len(devices) == every else min(1.0, *devices.values())
            nodes[name] = nodes.get(name, 1.0) * least
        return nodes

    def _shares(self, rates: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        network: dict[str, float] = {}
        inside: dict[str, float] = {}
        for name, rate in rates.items():
            nominal = self._link(name).capacity.at(0.0)
            shares = inside if self._is_inside(name) else network
            for node in self._nodes_of(name):
                shares[node] = min(shares.get(node, 1.0), rate / nominal)
        return network, inside

    def _latencies_s(self, latencies_s: Mapping[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, latency_s in latencies_s.items():
            if not self._is_inside(name):
                more_s = latency_s - self._link(name).latency_s
                for node in self._nodes_of(name):
                    found[node] = max(found.get(node, 0.0), self._outermost_s + max(more_s, 0.0))
        return found

    @property
    def _outermost_s(self) -> float:
        return self.cluster.tiers[-1].latency_s

    def _link(self, name: str) -> Link:
        if not self._links:
            self._links = {link.name: link for link in link_graph(self.cluster)}
        return self._links[name]

    def _is_inside(self, name: str) -> bool:
        """Whether the link belongs to a scale-up fabric or joins a device to its host."""
        link = self._link(name)
        endpoints = (link.source[0], link.target[0])
        return not self.cluster.links and ("u" in endpoints or "d" in endpoints)

    def _nodes_of(self, name: str) -> Iterable[str]:
        link = self._link(name)
        for end in (link.source, link.target):
            number = end[1:]
            if end[0] == "n" and number.isdigit():
                return (end,)
            if end[0] == "d" and number.isdigit():
                return (f"n{self._node_of_rank[int(number)]}",)
        lower = min(link.source, link.target)
        if self.cluster.links or "g" not in lower:
            return self.pool_of
        tier, group = lower.split("g")
        span = self._spans[tier]
        first, last = int(group) * span, (int(group) + 1) * span
        return tuple(f"n{index}" for index, rank in enumerate(self._first_ranks[:-1]) if first <= rank < last)


def uniform_cluster(cluster: Cluster, pool: Pool, nodes: int, state: NodeState) -> Cluster:
    """A cluster of `nodes` nodes of a pool of `cluster`, all in one state, with the tiers that they span."""
    own = replace(pool.node, speed=pool.node.speed * state.speed)
    every = (own,) * nodes
    if cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes)):
        tiers = default_tiers_in_groups(cluster.classes, every, state.spans)
    else:
        spans = dict(zip(inter_node_tiers(cluster), state.spans, strict=False))
        tiers = clipped_tiers(with_spans(cluster.tiers, spans), own.devices * nodes)
    return with_nodes(cluster, every, _in_states(cluster, tiers, [own], state))


def current_cluster(cluster: Cluster, states: Mapping[str, NodeState]) -> Cluster:
    """The nodes of `cluster` that have a state, in its order, each at its own speed.

    Tiers inside and between nodes get the bandwidth and the latency of the worst node."""
    places = [place for place in range(len(cluster.nodes)) if f"n{place}" in states]
    part = cluster_of_nodes(cluster, places)
    every = [states[f"n{place}"] for place in places]
    worst = NodeState(
        pool=0,
        network=min(state.network for state in every),
        inside=min(state.inside for state in every),
        latency_s=max(state.latency_s for state in every),
        inter_site_share=min(state.inter_site_share for state in every),
        inter_site_latency_s=max(state.inter_site_latency_s for state in every),
        site_tiers=min(state.site_tiers for state in every),
    )
    nodes = tuple(
        replace(node, speed=node.speed * state.speed) for node, state in zip(part.nodes, every, strict=True)
    )
    return with_nodes(cluster, nodes, _in_states(cluster, part.tiers, nodes, worst))


def _in_states(
    cluster: Cluster, tiers: Sequence[Tier], nodes: Sequence[Node], state: NodeState
) -> tuple[Tier, ...]:
    """`tiers` of some nodes of `cluster` with the bandwidth and the latency of `state`.

    Tiers between sites have at most the bandwidth that may leave a site."""
    inside = max(node.devices for node in nodes)
    if cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes)):
        joining = [tier.name for tier in tiers if not tier.is_network]
    else:
        joining = [tier.name for tier in inter_node_tiers(cluster)]
    inter_site_share = state.inter_site_share * min(
        node.nics * node.nic_bytes_per_s / node.devices for node in nodes
    )
    found = []
    for tier in tiers:
        now = _in_state(tier, inside, state)
        if tier.span > inside and tier.name not in joining[: state.site_tiers]:
            latency_s = max(now.latency_s, state.inter_site_latency_s)
            share = min(inter_site_share / now.bytes_per_s, 1.0) if state.inter_site_share < 1.0 else 1.0
            now = _slower(now, share, latency_s)
        found.append(now)
    return tuple(found)


def _in_state(tier: Tier, inside: int, state: NodeState) -> Tier:
    """A tier with the bandwidth share and the latency of `state`."""
    if tier.span <= inside:
        return _slower(tier, state.inside, tier.latency_s)
    latency_s = max(tier.latency_s, state.latency_s)
    if tier.is_network:
        return _slower(tier, state.network, latency_s)
    # A scale-up fabric over several nodes, or the outer tier of a cluster whose file gave links.
    return _slower(tier, min(state.inside, state.network), latency_s)


def _slower(tier: Tier, share: float, latency_s: float) -> Tier:
    return replace(
        tier,
        bytes_per_s=tier.bytes_per_s * share,
        flow_bytes_per_s=tier.flow_bytes_per_s * share,
        latency_s=latency_s,
    )
