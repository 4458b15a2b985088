"""The tiers of a cluster: default ones, those of given links, and the members of a rank group per tier.

`default_tiers` has the scale-up fabric, the host links, and the network between nodes. `tiers_of_links` has
the bandwidth of rings over consecutive devices. `group_members` counts the ranks of a group that share a
group of each tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from shardwise.cluster.cluster import Cluster, Link, Node, Tier, node_runs
from shardwise.cluster.device import Device
from shardwise.cluster.link_groups import LinkLevel, nested_groups, outgoing_bytes_per_s
from shardwise.cluster.links import route

# Default tiers
NodeRun = tuple[Node, int]
"""A node and the number of such nodes in a row."""


def scale_up_span(device: Device, node_devices: int) -> int:
    """Devices of one scale-up group in nodes of `node_devices` devices.

    A domain of the size of the default node is the node, whatever its size. A larger domain has whole nodes
    (72 devices over nodes of 4). A smaller one (bridged pairs) has a divisor of the node's devices.
    """
    domain = device.scale_up_domain
    if domain < device.devices_per_node:
        return gcd(domain, node_devices)
    if domain > device.devices_per_node:
        return max(domain // node_devices, 1) * node_devices
    return node_devices


def _in_use(span: int, node_devices: int, devices: int) -> int:
    """Devices per scale-up group of `span` devices for a job of `devices` devices; the same in each group.

    256 devices on racks of 72 use 64 devices of four racks, as schedulers place them, not three racks and a
    half. Where no number of at least half a group divides `devices`, groups are filled one by one.
    """
    if devices <= span or span <= node_devices:
        return span
    parts = (part for part in range(span, span // 2, -node_devices) if devices % part == 0)
    return next(parts, span)


def group_span(device: Device, node_devices: int, devices: int) -> int:
    """Devices per scale-up group that a job of `devices` devices uses on such nodes."""
    return _in_use(scale_up_span(device, node_devices), node_devices, devices)


def common_span(runs: Sequence[NodeRun], group: Callable[[Node], int]) -> int:
    """Largest span whose consecutive blocks of ranks are each inside one group of `group(node)` devices.

    Every group starts at a multiple of the span, so it is the greatest common divisor of the starts. Example:
    4 nodes of 8 and 4 nodes of 4, with nodes as groups, start at 8, 16, 24, 32, 36, ...; the span is 4.
    """
    offset, span = 0, 0
    for node, count in runs:
        total, size = node.devices * count, group(node)
        span = gcd(span, offset, size if total > size else 0)
        offset += total
    return span or offset


def default_tiers(classes: Mapping[str, Device], runs: Sequence[NodeRun]) -> tuple[Tier, ...]:
    """Tiers of nodes with the fabrics of their devices and their network cards; mixed nodes get the weakest
    figures.

    Each network card of a node is on a network of its own. There is at least one tier, and the last spans all
    devices.
    """
    devices = sum(node.devices * count for node, count in runs)
    inner = common_span(
        runs,
        lambda node: group_span(classes[node.device_class], node.devices, devices),
    )
    whole = common_span(runs, lambda node: node.devices)
    tiers: list[Tier] = []
    if inner > 1 or devices == 1:
        tiers.append(scale_up_tier(classes, runs, min(inner, devices)))
    if inner < whole and _has_bridges(classes, runs):
        tiers.append(_host_tier(classes, runs, min(whole, devices)))
    if not tiers or tiers[-1].span < devices:
        tiers.append(_network_tier(classes, runs, devices))
    return tuple(tiers)


def _devices_of(classes: Mapping[str, Device], runs: Sequence[NodeRun]) -> Iterator[Device]:
    return (classes[name] for name in dict.fromkeys(node.device_class for node, _ in runs))


def _has_bridges(classes: Mapping[str, Device], runs: Sequence[NodeRun]) -> bool:
    return any(scale_up_span(classes[node.device_class], node.devices) < node.devices for node, _ in runs)


def scale_up_tier(classes: Mapping[str, Device], runs: Sequence[NodeRun], span: int) -> Tier:
    """The tier of the devices' scale-up fabrics; the weakest figures where kinds are mixed."""
    kinds = tuple(_devices_of(classes, runs))
    rate = min(device.scale_up_bytes_per_s for device in kinds)
    return Tier(
        name=" / ".join(dict.fromkeys(device.scale_up_name for device in kinds)),
        span=span,
        bytes_per_s=rate,
        flow_bytes_per_s=rate,
        latency_s=max(device.scale_up_latency_s for device in kinds),
        in_switch_reduction=all(device.scale_up_in_switch_reduction for device in kinds),
        part_shares=_part_shares(kinds, rate),
    )


def _part_shares(kinds: Sequence[Device], rate: float) -> tuple[tuple[int, float], ...]:
    """`part_shares` of devices with direct links and no switch: pairs of group size and share of `rate`; the
    least share where kinds are mixed."""
    sizes = sorted({size for device in kinds for size, _ in device.scale_up_links})
    return tuple((size, min(_reached_bytes_per_s(device, size) for device in kinds) / rate) for size in sizes)


def _reached_bytes_per_s(device: Device, size: int) -> float:
    counts = [count for group, count in device.scale_up_links if group <= size]
    share = counts[-1] / device.scale_up_links[-1][1] if counts else 1.0
    return device.scale_up_bytes_per_s * share


def _host_tier(classes: Mapping[str, Device], runs: Sequence[NodeRun], span: int) -> Tier:
    """The tier of the host links of a node, for nodes that are larger than their scale-up groups."""
    rate = min(node.host_link_bytes_per_s for node, _ in runs)
    latency = max(device.scale_up_latency_s for device in _devices_of(classes, runs))
    return Tier(name="host links", span=span, bytes_per_s=rate, flow_bytes_per_s=rate, latency_s=latency)


def _network_tier(classes: Mapping[str, Device], runs: Sequence[NodeRun], span: int) -> Tier:
    figures = network_figures([node for node, _ in runs])
    kinds = tuple(_devices_of(classes, runs))
    return Tier(
        name=" / ".join(dict.fromkeys(device.scale_out_name.split()[0] for device in kinds)),
        span=span,
        bytes_per_s=figures.bytes_per_s,
        flow_bytes_per_s=figures.flow_bytes_per_s,
        latency_s=max(device.scale_out_latency_s for device in kinds),
        is_network=True,
    )


@dataclass(frozen=True, slots=True)
class NetworkFigures:
    """Bandwidth of a device through its node's network cards in bytes per second and direction: while all
    devices send, and for one that sends alone."""

    bytes_per_s: float
    flow_bytes_per_s: float


def network_figures(
    nodes: Sequence[Node], *, oversubscription: float = 1.0, rails: int | None = None
) -> NetworkFigures:
    """The figures of the weakest of `nodes`. All devices share all cards; a device that sends alone has the
    cards of one rail.

    Example: 4 cards of 25 GB/s for 8 devices give 12.5 GB/s per device while all send, and 25 GB/s alone with
    one rail per card.
    """
    share = min(node.nics * node.nic_bytes_per_s / node.devices for node in nodes)
    alone = min(node.nics * node.nic_bytes_per_s / (rails or node.nics) for node in nodes)
    return NetworkFigures(share / oversubscription, max(share / oversubscription, alone))


# Tiers of given links
def tiers_of_links(cluster: Cluster) -> tuple[Tier, ...]:
    """A tier for the node and one for the whole cluster, from the cluster's links; between them one for each
    level of groups of nodes that are joined more closely than others (`nested_groups`).

    Where there is no such level they have the figures of a ring over the devices of each group, along the
    routes of the link graph. `bytes_per_s` is the least capacity of a link divided by the hops that share it.
    `flow_bytes_per_s` is the least capacity on a hop, and `latency_s` the longest latency of a hop.
    """
    inner = common_span(node_runs(cluster.nodes), _devices)
    levels = nested_groups(cluster.nodes, cluster.links)
    if len(levels) > 1:
        return _tiers_of_levels(cluster, inner, levels)
    spans = [span for span in (inner, cluster.devices) if span > 1] or [1]
    tiers: list[Tier] = []
    for span in dict.fromkeys(spans):
        ring = _rings(cluster, span)
        name = "node" if span < cluster.devices else "cluster"
        tiers.append(
            Tier(
                name=name,
                span=span,
                bytes_per_s=ring.shared,
                flow_bytes_per_s=ring.alone,
                latency_s=ring.latency_s,
            )
        )
    return tuple(tiers)


def _tiers_of_levels(cluster: Cluster, inner: int, levels: Sequence[LinkLevel]) -> tuple[Tier, ...]:
    """The tiers of a cluster whose nodes are in the order of their groups.

    A device of a group below has its share of what the group can send to the rest of the group above, and
    alone the widest route between them.
    """
    tiers: list[Tier] = []
    if inner > 1:
        ring = _rings(cluster, inner)
        tiers.append(
            Tier(name="node", span=inner, bytes_per_s=ring.shared, flow_bytes_per_s=ring.alone,
                 latency_s=ring.latency_s)
        )  # fmt: skip
    below = inner
    for level in levels:
        span = cluster.devices // len(level.groups)
        shares = []
        for first in range(0, cluster.devices, below):
            start = first // span * span
            members = [f"d{rank}" for rank in range(first, first + below)]
            others = {f"d{rank}" for rank in range(start, start + span)} - set(members)
            shares.append(outgoing_bytes_per_s(cluster.links, members, others) / below)
        tiers.append(
            Tier(
                name="cluster" if span == cluster.devices else f"group of {span // inner} nodes",
                span=span,
                bytes_per_s=min(shares),
                flow_bytes_per_s=max(level.joined_bytes_per_s, min(shares)),
                latency_s=_rings(cluster, span).latency_s,
                is_network=True,
            )
        )
        below = span
    return tuple(tiers)


def _devices(node: Node) -> int:
    return node.devices


@dataclass(frozen=True, slots=True)
class _Rings:
    shared: float
    alone: float
    latency_s: float


def _rings(cluster: Cluster, span: int) -> _Rings:
    """Bandwidth and latency of the hops of one ring per group of `span` devices, with all rings active."""
    by_name = {link.name: link for link in cluster.links}
    load: Counter[str] = Counter()
    paths: list[Sequence[Link]] = []
    for first in range(0, cluster.devices, span):
        ranks = range(first, min(first + span, cluster.devices))
        for rank in ranks if len(ranks) > 1 else ():
            names = route(cluster, rank, rank + 1 if rank + 1 < ranks.stop else first)
            load.update(names)
            paths.append([by_name[name] for name in names])
    if not paths:
        fastest = max(link.capacity.at(0.0) for link in cluster.links)
        return _Rings(fastest, fastest, 0.0)
    return _Rings(
        shared=min(link.capacity.at(0.0) / load[link.name] for path in paths for link in path),
        alone=min(link.capacity.at(0.0) for path in paths for link in path),
        latency_s=max(sum(link.latency_s for link in path) for path in paths),
    )


# Members of rank groups
Integers = npt.NDArray[np.int64]


def group_members(tiers: Sequence[Tier], stride: npt.ArrayLike, size: npt.ArrayLike) -> tuple[Integers, ...]:
    """Members of a mesh-axis group that share a group of each tier, innermost first; arrays of any one shape.

    A group has `size` ranks with distance `stride`, and starts at a multiple of `stride * size` plus less
    than `stride`. Where `stride * k` divides the span, k consecutive members share a tier's group. So
    k = gcd(size, span / stride), and 1 where the stride does not divide the span. The counts never decrease,
    and the last tier has all `size` members. In nodes of 8, tp 8 at stride 1 has 8 members inside a node, dp
    8 at stride 8 has one.
    """
    strides, sizes = np.asarray(stride, dtype=np.int64), np.asarray(size, dtype=np.int64)
    members: list[Integers] = []
    least = np.ones(np.broadcast_shapes(strides.shape, sizes.shape), dtype=np.int64)
    for index, tier in enumerate(tiers):
        if index == len(tiers) - 1:
            inside = sizes
        else:
            fits = np.where(tier.span % strides == 0, tier.span // strides, 1)
            inside = np.gcd(sizes, fits)
        least = np.maximum(least, inside)
        members.append(least)
    return tuple(members)
