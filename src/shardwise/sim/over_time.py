"""An event trace as the engine takes it: capacities of links and speeds of devices as functions of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from shardwise.cluster import (
    Capacity,
    Cluster,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Slowdown,
    link_graph,
)
from shardwise.sim.task_graph import Link, Speed


def links_over_time(cluster: Cluster, trace: EventTrace) -> tuple[Link, ...]:
    """All links of the cluster, each with its capacity from 0 to the end of the trace and beyond. Latencies
    and what lies between sites are no capacities of links: they are left out."""
    changes: dict[str, dict[float, float]] = {}
    for event in trace.events:
        if isinstance(event, LinkChange) and event.link is not None and event.bytes_per_s is not None:
            changes.setdefault(event.link, {})[event.time_s] = event.bytes_per_s
    return tuple(
        Link(link.name, _changed(link.capacity, changes.get(link.name, {}))) for link in link_graph(cluster)
    )


def _changed(capacity: Capacity, changes: Mapping[float, float]) -> Capacity:
    """The link's own capacity up to the first change, then what the changes say."""
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
    """The speed of every device (by rank) that is not always at its own: the product of its own and its
    node's, and 0 while its node is not there."""
    firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))
    ranks = {f"n{index}": range(firsts[index], firsts[index + 1]) for index in range(len(cluster.nodes))}
    shares = {f"d{rank}": 1.0 for rank in range(cluster.devices)} | dict.fromkeys(ranks, 1.0)
    there = {name: name not in trace.absent for name in ranks}
    node_of = {rank: name for name, members in ranks.items() for rank in members}
    profiles: dict[int, dict[float, float]] = {
        rank: {0.0: 0.0} for name in sorted(trace.absent) for rank in ranks[name]
    }
    for event in trace.events:
        touched: Iterable[int] = ()
        if isinstance(event, Slowdown):
            shares[event.where] = event.speed
            touched = ranks[event.where] if event.where in ranks else (int(event.where[1:]),)
        elif isinstance(event, NodeLost | NodeJoined):
            there[event.node] = isinstance(event, NodeJoined)
            touched = ranks[event.node]
        for rank in touched:
            name = node_of[rank]
            factor = shares[f"d{rank}"] * shares[name] if there[name] else 0.0
            profiles.setdefault(rank, {0.0: 1.0})[event.time_s] = factor
    return {
        rank: Speed(tuple(profile), tuple(profile.values())) for rank, profile in sorted(profiles.items())
    }
