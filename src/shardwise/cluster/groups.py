"""Groups of nodes below one switch, and the tiers of nodes in another order.

A tier groups consecutive devices of a cluster. A plan on some nodes, or on all nodes in another order, has
the tier's bandwidth only between devices of one group of the cluster. Nodes of two racks communicate through
the tier between racks, wherever they are in the plan. `NodeGroups` knows the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd

from shardwise.cluster.cluster import Cluster, Node, Tier, node_runs
from shardwise.cluster.device import Device
from shardwise.cluster.tiers import default_tiers, group_span


def inter_node_tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of a cluster whose groups are larger than its largest node, without the last tier."""
    largest = max(node.devices for node in cluster.nodes)
    return tuple(tier for tier in cluster.tiers[:-1] if tier.span > largest)


class NodeGroups:
    """The groups of nodes in each tier between one node and the whole cluster, innermost first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._between = inter_node_tiers(cluster)
        self._has_default_tiers = cluster.tiers == default_tiers(cluster.classes, node_runs(cluster.nodes))
        self._group_of = self._default_groups() if self._has_default_tiers else self._given_groups()
        self.has_any = any(self._group_of)
        """Whether any node is in such a group."""

    def of(self, place: int) -> tuple[int, ...]:
        """The groups of the node at index `place`, one per tier."""
        return self._group_of[place]

    def spans(self, node: Node, devices: int) -> tuple[int, ...]:
        """Devices of a group of each tier in a cluster of `devices` devices with nodes like `node`."""
        if not self._has_default_tiers:
            return tuple(tier.span for tier in self._between)
        span = group_span(self._cluster.classes[node.device_class], node.devices, devices)
        return (span,) if span > node.devices else ()

    def changed_spans(self, places: Sequence[int], like: int) -> tuple[int, ...]:
        """`common_spans` of these nodes; empty where they equal `spans` of nodes like node `like`."""
        devices = sum(self._cluster.nodes[place].devices for place in places)
        common_spans = self.common_spans(places, like)
        return () if common_spans == self.spans(self._cluster.nodes[like], devices) else common_spans

    def common_spans(self, places: Sequence[int], like: int | None = None) -> tuple[int, ...]:
        """Devices of a group of each tier for these nodes in this order.

        A span is the largest whose groups of consecutive devices are each within one group of the cluster; it
        is at least the largest node. `like` is the index of the node whose kind has the nominal spans (by
        default the first node)."""
        nodes = [self._cluster.nodes[place] for place in places]
        like_node = nodes[0] if like is None else self._cluster.nodes[like]
        firsts = list(accumulate((node.devices for node in nodes), initial=0))
        inner, found = max(node.devices for node in nodes), list[int]()
        for level, span in enumerate(self.spans(like_node, firsts[-1])):
            groups = [self._group_of[place][level : level + 1] for place in places]
            own = self._own_span(level, like_node)
            sizes = {span, own, *(span // part for part in range(2, span // inner + 1) if span % part == 0)}
            fitting = (size for size in sorted(sizes, reverse=True) if size > inner and size % inner == 0)
            inner = next((size for size in fitting if _fits_groups(size, firsts, groups)), inner)
            found.append(inner)
        return tuple(found)

    def separate_tiers(self, first: Iterable[int], second: Iterable[int]) -> int:
        """Number of innermost tiers in which no group has nodes of both sets."""
        ones, others = list(first), list(second)
        for level in range(max(map(len, self._group_of))):
            here = {self._group_of[place][level : level + 1] for place in ones}
            if here & {self._group_of[place][level : level + 1] for place in others}:
                return level
        return max(map(len, self._group_of))

    def ordered(self, places: Iterable[int], rank: Callable[[int], tuple[float, ...]]) -> list[int]:
        """These nodes ordered so that groups stay together, from the outermost tier to the innermost.

        Groups with most of the nodes come first, then those with the best node (by `rank`)."""
        best_first = sorted(places, key=rank)
        counts: dict[tuple[int, ...], int] = {}
        leads: dict[tuple[int, ...], int] = {}
        for turn, place in enumerate(best_first):
            for inner in range(len(self._group_of[place])):
                group = self._group_of[place][inner:]
                counts[group] = counts.get(group, 0) + 1
                leads.setdefault(group, turn)

        def key(place: int) -> list[tuple[int, int]]:
            groups = self._group_of[place]
            within = [groups[inner:] for inner in range(len(groups) - 1, -1, -1)]
            return [(-counts[group], leads[group]) for group in within]

        return sorted(best_first, key=key)

    def _given_groups(self) -> list[tuple[int, ...]]:
        firsts = accumulate((node.devices for node in self._cluster.nodes[:-1]), initial=0)
        return [tuple(first // tier.span for tier in self._between) for first in firsts]

    def _default_groups(self) -> list[tuple[int, ...]]:
        """Scale-up groups over several nodes; the nodes of a run fill them in order."""
        found: list[tuple[int, ...]] = []
        for node, count in node_runs(self._cluster.nodes):
            start = len(found)
            for span in self.spans(node, count * node.devices) or (0,):
                each = span // node.devices
                found += [(start + place // each,) if each else () for place in range(count)]
        return found

    def _own_span(self, level: int, node: Node) -> int:
        if not self._has_default_tiers:
            return self._between[level].span
        count = sum(run for one, run in node_runs(self._cluster.nodes) if one == node)
        return group_span(self._cluster.classes[node.device_class], node.devices, count * node.devices)


def _fits_groups(span: int, firsts: Sequence[int], groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether every block of `span` consecutive devices is within one group."""
    first_of: dict[int, tuple[int, ...]] = {}
    for group, first, end in zip(groups, firsts, firsts[1:], strict=False):
        block = first // span
        if not group or (end - 1) // span != block or first_of.setdefault(block, group) != group:
            return False
    return True


def default_tiers_in_groups(
    classes: Mapping[str, Device], nodes: tuple[Node, ...], spans: Sequence[int]
) -> tuple[Tier, ...]:
    """Default tiers of `nodes`; scale-up groups over several nodes have at most `spans` devices (where it is
    empty: the default)."""
    tiers = default_tiers(classes, node_runs(nodes))
    if not spans:
        return tiers
    devices, largest = sum(node.devices for node in nodes), max(node.devices for node in nodes)
    if not tiers[-1].is_network and spans[0] < devices:
        # All nodes would be one group, but are not: they use the network of a larger cluster of such nodes.
        most = max(device.scale_up_domain for device in classes.values())
        network = default_tiers(classes, node_runs(nodes * (most // devices + 2)))[-1]
        tiers = (*tiers, replace(network, span=devices))
    joining = [tier for tier in tiers[:-1] if tier.span > largest]
    if len({node.device_class for node in nodes}) > 1:
        spans = [max(gcd(tier.span, spans[0]), largest) for tier in joining]
    return with_spans(tiers, dict(zip(joining, spans, strict=False)))


def with_spans(tiers: Sequence[Tier], spans: Mapping[Tier, int]) -> tuple[Tier, ...]:
    """The tiers with new `spans`; a tier that is no larger than the one inside it is left out."""
    found: list[Tier] = []
    for tier in tiers:
        clipped = replace(tier, span=spans.get(tier, tier.span))
        if not found or clipped.span > found[-1].span:
            found.append(clipped)
    return tuple(found)
