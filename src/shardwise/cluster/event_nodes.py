"""Events as they are planned for, node by node, and what is to be said of those that this changes.

A device that is lost or runs at a speed of its own is taken for its node, and a link that changes for all
that its nodes send and receive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import prod

from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.events import (
    ClusterEvent,
    DeviceLost,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
)
from shardwise.cluster.links import link_graph
from shardwise.errors import ConfigError

NAMED = 3
"""Nodes or links that a line names, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvents:
    """A trace in which nodes are lost, and no devices; `priced_as` says what of the trace as it was given is
    priced as something else, a line each."""

    trace: EventTrace
    priced_as: tuple[str, ...]


def events_of_nodes(trace: EventTrace, cluster: Cluster, *, file: str | None = None) -> NodeEvents:
    """The events of a trace of `cluster` node by node. ConfigError where a device is lost whose node is not
    there, or a node joins that is."""
    replay = _NodeReplay(trace, cluster, file)
    events: list[ClusterEvent] = []
    for _, at_once in groupby(enumerate(trace.events, start=1), key=lambda one: one[1].time_s):
        for place, event in at_once:
            events += replay.after(place, event)
        replay.note_slow_devices()
    lines = (*replay.device_lines(), *_link_lines(trace, cluster))
    return NodeEvents(trace=replace(trace, events=tuple(events)), priced_as=lines)


@dataclass
class _NodeApproximation:
    """Devices that are taken for their node, and the least speed at which all of it is priced: 0 where it
    counts as lost."""

    devices: dict[str, None] = field(default_factory=dict)
    speed: float = 1.0


class _NodeReplay:
    """The nodes of a cluster, from event to event."""

    def __init__(self, trace: EventTrace, cluster: Cluster, file: str | None) -> None:
        self._cluster, self._file = cluster, file
        self._firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))
        self._there = {f"n{index}" for index in range(trace.nodes)} - trace.absent
        self._without_device: set[str] = set()
        """Nodes that count as lost since a device of theirs is."""
        self._speeds: dict[str, float] = {}
        self._changed: set[str] = set()
        self._approximations: dict[str, _NodeApproximation] = {}

    def after(self, place: int, event: ClusterEvent) -> Iterator[ClusterEvent]:
        """What an event is for the nodes."""
        if isinstance(event, DeviceLost):
            yield from self._device_lost(place, event)
        elif isinstance(event, NodeLost | Notice) and event.node in self._without_device:
            pass  # it counts as lost already
        elif isinstance(event, NodeJoined):
            yield from self._joined(place, event)
        else:
            if isinstance(event, NodeLost):
                self._there.discard(event.node)
            if isinstance(event, Slowdown):
                self._speeds[event.where] = event.speed
                self._changed.add(self._node_of(event.where))
            yield event

    def _device_lost(self, place: int, event: DeviceLost) -> Iterator[ClusterEvent]:
        node = self._node_of(event.device)
        if node in self._without_device:
            self._approximate(node, [event.device], 0.0)
        elif node not in self._there:
            raise self._error(place, f"loses {event.device}, whose node {node} is not there")
        else:
            self._there.discard(node)
            self._without_device.add(node)
            if self._devices(node) > 1:
                self._approximate(node, [event.device], 0.0)
            yield NodeLost(time_s=event.time_s, node=node)

    def _joined(self, place: int, event: NodeJoined) -> Iterator[ClusterEvent]:
        """A node that joins is as new, with all of its devices."""
        if event.node in self._there:
            raise self._error(place, f"lets {event.node} join, which is there already")
        self._there.add(event.node)
        self._without_device.discard(event.node)
        self._speeds.pop(event.node, None)
        yield event
        for device in self._names(event.node):
            if self._speeds.pop(device, 1.0) != 1.0:
                yield Slowdown(time_s=event.time_s, where=device, speed=1.0)

    def note_slow_devices(self) -> None:
        """At an instant: which nodes have devices at other speeds than all of them are priced at."""
        for node in sorted(self._changed & self._there):
            own = {
                name: prod(self._speeds.get(which, 1.0) for which in (name, node))
                for name in self._names(node)
            }
            node_speed = min(1.0, *own.values())
            if any(speed != node_speed for speed in own.values()):
                self._approximate(
                    node, [name for name in own if self._speeds.get(name, 1.0) != 1.0], node_speed
                )
        self._changed.clear()

    def _approximate(self, node: str, devices: Iterable[str], speed: float) -> None:
        approximation = self._approximations.setdefault(node, _NodeApproximation())
        approximation.devices.update(dict.fromkeys(devices))
        approximation.speed = min(approximation.speed, speed)

    def device_lines(self) -> Iterator[str]:
        """A line for all devices that are taken for their nodes, if any are."""
        texts = []
        for node, approximation in sorted(self._approximations.items(), key=lambda one: int(one[0][1:]))[
            :NAMED
        ]:
            names = list(approximation.devices)
            many = self._devices(node)
            at = f"run at {approximation.speed:g}" if approximation.speed else "count as lost"
            if not names:
                texts.append(f"{node} runs no faster than the cluster has it")
            else:
                verb = "is taken for its" if len(names) == 1 else "are taken for their"
                texts.append(f"{_named(names)} {verb} node {node}: all {many} devices of it {at}")
        if len(self._approximations) > NAMED:
            texts.append(f"{len(self._approximations) - NAMED} more nodes alike")
        if texts:
            yield f"{'; '.join(texts)}; nothing is proven of the devices themselves"

    def _error(self, place: int, text: str) -> ConfigError:
        return ConfigError(f"{text} (event {place})", file=self._file, key="events")

    def _node_of(self, where: str) -> str:
        return where if where[0] == "n" else f"n{bisect_right(self._firsts, int(where[1:])) - 1}"

    def _names(self, node: str) -> list[str]:
        index = int(node[1:])
        return [f"d{rank}" for rank in range(self._firsts[index], self._firsts[index + 1])]

    def _devices(self, node: str) -> int:
        return self._cluster.nodes[int(node[1:])].devices


def _link_lines(trace: EventTrace, cluster: Cluster) -> Iterator[str]:
    """A line for all links that change, if any do."""
    changes = [event for event in trace.events if isinstance(event, LinkChange)]
    own = {link.name: link for link in link_graph(cluster)} if changes else {}
    names = list(dict.fromkeys(_name(change) for change in changes if not _is_as_before(change, own)))
    if names:
        verb = "changes" if len(names) == 1 else "change"
        yield (
            f"{_named(names)} {verb}: taken for all that the nodes at the ends send and receive, and every "
            "node goes at the pace of the worst connected one; nothing is proven of the links themselves"
        )


def _name(change: LinkChange) -> str:
    return " and ".join(change.sites) if change.sites is not None else str(change.link)


def _is_as_before(change: LinkChange, own: Mapping[str, Link]) -> bool:
    """Whether a link gets the bandwidth and the latency that it has."""
    if change.link is None:
        return False
    link = own[change.link]
    has_rate = change.bytes_per_s in (None, link.capacity.at(0.0))
    return has_rate and change.latency_s in (None, link.latency_s)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
