"""An event trace for the engine: capacities of links and speeds of devices as functions of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from shardwise.cluster import (
    Capacity,
    Cluster,
    DeviceLost,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Slowdown,
    link_graph,
)
from shardwise.sim.engine import FlowLink, Speed


def links_over_time(cluster: Cluster, trace: EventTrace) -> tuple[FlowLink, ...]:
    """All links of the cluster with their capacities over the whole trace and after it.

    A capacity is 0 while the node or device of the link is absent. Changes of latencies and of connections
    between sites are not included, since they are not capacities of links.
    """
    changes: dict[str, dict[float, float]] = {}
    for event in trace.events:
        if isinstance(event, LinkChange) and event.link is not None and event.bytes_per_s is not None:
            changes.setdefault(event.link, {})[event.time_s] = event.bytes_per_s
    ranks, present = _ranks(cluster), _presence(cluster, trace)
    of = {f"d{rank}": name for name, members in ranks.items() for rank in members} | {
        name: name for name in ranks
    }
    found = []
    for link in link_graph(cluster):
        capacity = _changed(link.capacity, changes.get(link.name, {}))
        ends = [end for end in (link.source, link.target) if end in of]
        for name in dict.fromkeys((*(of[end] for end in ends), *ends)):
            capacity = _while_present(capacity, present.get(name, {}))
        found.append(FlowLink(link.name, capacity))
    return tuple(found)


def _ranks(cluster: Cluster) -> dict[str, range]:
    """The ranks of every node, by its name."""
    firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))
    return {f"n{index}": range(firsts[index], firsts[index + 1]) for index in range(len(cluster.nodes))}


def _presence(cluster: Cluster, trace: EventTrace) -> dict[str, dict[float, bool]]:
    """Whether each node, and each lost device, is present, from each instant of a change on.

    Devices return with their node.
    """
    ranks = _ranks(cluster)
    found = {name: {0.0: name not in trace.absent} for name in _ranks(cluster)}
    for event in trace.events:
        if isinstance(event, DeviceLost):
            found.setdefault(event.device, {0.0: True})[event.time_s] = False
        elif isinstance(event, NodeLost | NodeJoined):
            found[event.node][event.time_s] = isinstance(event, NodeJoined)
            for device in (f"d{rank}" for rank in ranks[event.node]):
                if isinstance(event, NodeJoined) and device in found:
                    found[device][event.time_s] = True
    return found


def _while_present(capacity: Capacity, present: Mapping[float, bool]) -> Capacity:
    """`capacity` while a node is present, and 0 otherwise."""
    if all(present.values()):
        return capacity
    times_s = sorted({*capacity.times_s, *present})
    rates, is_present = [], True
    for time_s in times_s:
        is_present = present.get(time_s, is_present)
        rates.append(capacity.at(time_s) if is_present else 0.0)
    return Capacity(tuple(times_s), tuple(rates))


def _changed(capacity: Capacity, changes: Mapping[float, float]) -> Capacity:
    """The link's own capacity up to the first change, then that of the changes."""
    if not changes:
        return capacity
    first_s = min(changes)
    own = [
        (time_s, rate)
        for time_s, rate in zip(capacity.times_s, capacity.bytes_per_s, strict=True)
        if time_s < first_s
    ]
    steps = [*own, *sorted(changes.items())]
    return Capacity(tuple(time_s for time_s, _ in steps), tuple(rate for _, rate in steps))


def speeds_over_time(cluster: Cluster, trace: EventTrace) -> dict[int, Speed]:
    """The speed of every device, by rank, whose speed changes.

    It is the product of the device's own speed and its node's, and 0 while its node is absent.
    """
    ranks = _ranks(cluster)
    shares = {f"d{rank}": 1.0 for rank in range(cluster.devices)} | dict.fromkeys(ranks, 1.0)
    present = {name: name not in trace.absent for name in ranks}
    node_of = {rank: name for name, members in ranks.items() for rank in members}
    lost: set[int] = set()
    profiles: dict[int, dict[float, float]] = {
        rank: {0.0: 0.0} for name in sorted(trace.absent) for rank in ranks[name]
    }
    for event in trace.events:
        touched: Iterable[int] = ()
        if isinstance(event, Slowdown):
            shares[event.where] = event.speed
            touched = ranks[event.where] if event.where in ranks else (int(event.where[1:]),)
        elif isinstance(event, DeviceLost):
            lost.add(int(event.device[1:]))
            touched = (int(event.device[1:]),)
        elif isinstance(event, NodeLost | NodeJoined):
            present[event.node] = isinstance(event, NodeJoined)
            touched = ranks[event.node]
            # A node that joins is new, with all its devices.
            shares |= dict.fromkeys((event.node, *(f"d{rank}" for rank in touched)), 1.0)
            lost -= set(touched)
        for rank in touched:
            name = node_of[rank]
            is_present = present[name] and rank not in lost
            factor = shares[f"d{rank}"] * shares[name] if is_present else 0.0
            profiles.setdefault(rank, {0.0: 1.0})[event.time_s] = factor
    return {
        rank: Speed(tuple(profile), tuple(profile.values())) for rank, profile in sorted(profiles.items())
    }
