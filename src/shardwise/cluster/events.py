"""Events of a cluster over time (`EventTrace`): link changes, slow devices, and nodes that leave and join.

Plans are made node by node, so `events_of_nodes` approximates events of devices by events of their nodes: a
lost device counts as a lost node, a slow device slows its whole node. A link change applies to all traffic of
the nodes at its ends. The answer lists these approximations (`priced_as`).

`generate_events` makes a trace of one of `EVENT_KINDS` from a seed. The same cluster, kind, length and seed
give the same trace.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import prod

from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.links import link_graph
from shardwise.errors import ConfigError

# Events and traces
MAX_DIGITS = 12
"""Most digits of the number of a node or device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """From `time_s` on, a link has another bandwidth or latency (None: unchanged).

    The link is either a `link` of the link graph (`n0>s1g0`), or all links between two `sites` of the trace,
    in both directions.
    """

    time_s: float
    link: str | None = None
    sites: tuple[str, str] | None = None
    bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A straggler: from `time_s` on, a device (`d5`) or all devices of a node (`n3`) run at `speed` times
    their nominal speed; 1 is nominal."""

    time_s: float
    where: str
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """At `time_s` a node leaves, with all state on it."""

    time_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost:
    """At `time_s` a device (`d5`) leaves; the other devices of its node stay. `events_of_nodes` replaces it
    by the loss of the node."""

    time_s: float
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """At `time_s` an absent node joins, without state."""

    time_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """At `time_s` a notice announces that a node leaves at `lost_at_s`; the node may stay nevertheless."""

    time_s: float
    node: str
    lost_at_s: float


ClusterEvent = LinkChange | Slowdown | NodeLost | DeviceLost | NodeJoined | Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTrace:
    """Events in the order of their times, on nodes `n0` to `n(nodes - 1)`.

    The `absent` nodes are not present at time 0. `sites` maps names to nodes. `source` describes the origin
    of the trace."""

    nodes: int
    events: tuple[ClusterEvent, ...]
    absent: frozenset[str] = frozenset()
    sites: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""

    @property
    def end_s(self) -> float:
        """The time of the last event; 0 where there is none."""
        return self.events[-1].time_s if self.events else 0.0

    def present(self) -> Iterator[tuple[float, frozenset[str]]]:
        """The present nodes with the time from which they are: at 0, and at each change."""
        there = frozenset(f"n{index}" for index in range(self.nodes)) - self.absent
        now = 0.0
        for event in self.events:
            if not isinstance(event, NodeLost | NodeJoined):
                continue
            if event.time_s > now:
                yield now, there
                now = event.time_s
            there = there - {event.node} if isinstance(event, NodeLost) else there | {event.node}
        yield now, there


def first_invalid_event(trace: EventTrace) -> tuple[int, str] | None:
    """The index of the first event that cannot follow those before it, and the reason; None where there is
    none.

    After the loss of any device, a present node may join: the trace does not know the node of that device.
    """
    lacks_devices = False
    there = {f"n{index}" for index in range(trace.nodes)} - trace.absent
    now = 0.0
    for place, event in enumerate(trace.events):
        if event.time_s < now:
            return place, f"is earlier than the event before it, at {now:g} s"
        now = event.time_s
        if isinstance(event, DeviceLost):
            lacks_devices = True
            if event.device[:1] != "d" or not _is_number_below(event.device[1:], 10**MAX_DIGITS):
                return place, f"names {event.device}, which is not a device d0, d1, ..."
        node = getattr(event, "node", None)
        if node is not None and not _is_node(node, trace.nodes):
            return place, f"names {node}, which is not one of n0 to n{trace.nodes - 1}"
        if isinstance(event, NodeLost | Notice) and event.node not in there:
            return place, f"names {event.node}, which is already lost or never joined"
        if isinstance(event, NodeLost):
            there.remove(event.node)
        if isinstance(event, NodeJoined):
            if event.node in there and not lacks_devices:
                return place, f"joins {event.node}, which is already present"
            there.add(event.node)
        if isinstance(event, Notice) and event.lost_at_s < event.time_s:
            return place, "gives notice of a loss in the past"
        if isinstance(event, LinkChange) and event.sites is not None:
            unknown = [site for site in event.sites if site not in trace.sites]
            if unknown or event.sites[0] == event.sites[1]:
                return place, f"names the sites {' and '.join(event.sites)}; known: {', '.join(trace.sites)}"
    return None


def _is_node(name: str, nodes: int) -> bool:
    return name[:1] == "n" and _is_number_below(name[1:], nodes)


def _is_number_below(text: str, count: int) -> bool:
    """Whether `text` is a decimal number from 0 to `count` - 1 without leading zeros."""
    is_plain = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return is_plain and str(int(text)) == text and int(text) < count


def check_events(trace: EventTrace, cluster: Cluster, *, file: str | None = None) -> None:
    """Raises ConfigError where a trace does not fit a cluster: another number of nodes, or a link or device
    that the cluster does not have."""
    if trace.nodes != len(cluster.nodes):
        raise ConfigError(
            "is a trace of another cluster",
            file=file,
            key="nodes",
            found=str(trace.nodes),
            allowed=f"the {len(cluster.nodes)} nodes of {cluster.name}",
        )
    links = {link.name for link in link_graph(cluster)} if _names_links(trace.events) else set()
    for place, event in enumerate(trace.events, start=1):
        if isinstance(event, LinkChange) and event.link is not None and event.link not in links:
            few = ", ".join(sorted(links)[:6])
            raise ConfigError(
                f"has no link {event.link} (event {place})", file=file, key="link", found=event.link,
                allowed=f"{few}, ...",
            )  # fmt: skip
        if isinstance(event, Slowdown) and not _is_place(event.where, cluster):
            allowed = f"n0 to n{len(cluster.nodes) - 1}, d0 to d{cluster.devices - 1}"
            raise ConfigError(
                f"is not a node or device of the cluster (event {place})", file=file, key="where",
                found=event.where, allowed=allowed,
            )  # fmt: skip
        if isinstance(event, DeviceLost) and not _is_place(event.device, cluster):
            raise ConfigError(
                f"is not a device of the cluster (event {place})", file=file, key="device",
                found=event.device, allowed=f"d0 to d{cluster.devices - 1}",
            )  # fmt: skip


def _names_links(events: Iterable[ClusterEvent]) -> bool:
    return any(isinstance(event, LinkChange) and event.link is not None for event in events)


def _is_place(where: str, cluster: Cluster) -> bool:
    count = {"n": len(cluster.nodes), "d": cluster.devices}.get(where[:1], 0)
    return _is_number_below(where[1:], count)


# Events of nodes
NAMED = 3
"""Most nodes or links that a line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvents:
    """A trace without lost devices. `priced_as` has one line per approximation of the given trace."""

    trace: EventTrace
    priced_as: tuple[str, ...]


def events_of_nodes(trace: EventTrace, cluster: Cluster, *, file: str | None = None) -> NodeEvents:
    """The events of a trace of `cluster`, node by node.

    Raises ConfigError for the loss of a device whose node is absent, and for a present node that joins."""
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
    """The approximation of a node: the devices whose events apply to the whole node, and the least speed that
    the node is estimated with (0: it counts as lost)."""

    devices: dict[str, None] = field(default_factory=dict)
    speed: float = 1.0


class _NodeReplay:
    """Replays a trace and converts its events to events of nodes."""

    def __init__(self, trace: EventTrace, cluster: Cluster, file: str | None) -> None:
        self._cluster, self._file = cluster, file
        self._firsts = tuple(accumulate((node.devices for node in cluster.nodes), initial=0))
        self._there = {f"n{index}" for index in range(trace.nodes)} - trace.absent
        self._without_device: set[str] = set()
        """Nodes that count as lost because one of their devices is lost."""
        self._speeds: dict[str, float] = {}
        self._changed: set[str] = set()
        self._approximations: dict[str, _NodeApproximation] = {}

    def after(self, place: int, event: ClusterEvent) -> Iterator[ClusterEvent]:
        """The events of nodes for the event at index `place` (from 1)."""
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
            raise self._error(place, f"loses {event.device}, whose node {node} is absent")
        else:
            self._there.discard(node)
            self._without_device.add(node)
            if self._devices(node) > 1:
                self._approximate(node, [event.device], 0.0)
            yield NodeLost(time_s=event.time_s, node=node)

    def _joined(self, place: int, event: NodeJoined) -> Iterator[ClusterEvent]:
        """A node joins with all of its devices, at their nominal speed."""
        if event.node in self._there:
            raise self._error(place, f"joins {event.node}, which is already present")
        self._there.add(event.node)
        self._without_device.discard(event.node)
        self._speeds.pop(event.node, None)
        yield event
        for device in self._names(event.node):
            if self._speeds.pop(device, 1.0) != 1.0:
                yield Slowdown(time_s=event.time_s, where=device, speed=1.0)

    def note_slow_devices(self) -> None:
        """Records the nodes that have devices at another speed than the node is estimated with."""
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
        """One line for all nodes that approximate devices, if any.

        Plan files contain the line, so its text is part of the format."""
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
    """One line for all links that change, if any.

    Plan files contain the line, so its text is part of the format."""
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
    """Whether a change sets the nominal bandwidth and latency of its link."""
    if change.link is None:
        return False
    link = own[change.link]
    has_rate = change.bytes_per_s in (None, link.capacity.at(0.0))
    return has_rate and change.latency_s in (None, link.latency_s)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


# Generated traces
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

DIURNAL_STEP_S, DIURNAL_LEAST, DIURNAL_NOISE = 900.0, 0.4, 0.05
"""`diurnal`: time between changes, least share of a link's bandwidth, and relative noise.

The share follows a daily cosine between the least share and 1."""

QUIET_S, BURST_S, BURST_SHARE = 2 * HOUR_S, 600.0, (0.1, 0.5)
"""`bursty`: mean time between bursts of other traffic, their mean length, and range of the share of bandwidth
that they leave."""

STEADY_S, FLAPS, FLAP_S, FLAP_SHARE = 6 * HOUR_S, 8, 20.0, 0.05
"""`flapping`: mean time between series of flaps, flaps per series, mean length of the up and the down state,
and share of bandwidth in the down state."""

STAY_S, AWAY_S, NOTICE_S = 8 * HOUR_S, HOUR_S, 120.0
"""`preemption`: mean time that a node is present, mean time that it is absent, and time from notice to
loss."""

WELL_S, SLOW_S, SLOW_SPEED = 12 * HOUR_S, HOUR_S, (0.3, 0.9)
"""`slowdown`: mean time at nominal speed, mean time at reduced speed, and range of the reduced speed."""


def generate_events(cluster: Cluster, kind: str, *, length_s: float, seed: int) -> EventTrace:
    """A generated trace of one of `EVENT_KINDS` for a cluster; its length is `length_s` seconds."""
    rng = random.Random(f"{kind} {seed}")
    events = sorted(EVENT_KINDS[kind](cluster, rng, length_s), key=lambda event: event.time_s)
    source = f"shardwise events generate {kind}, seed {seed}, {length_s:g} s, for {cluster.name}"
    return EventTrace(nodes=len(cluster.nodes), events=tuple(events), source=source[:1000])


def _network_links(cluster: Cluster) -> list[Link]:
    """The links between nodes and switches, or all links where there are none."""
    links = link_graph(cluster)
    network = [link for link in links if "d" not in (link.source[:1], link.target[:1])]
    network = [link for link in network if "u" not in (link.source[:1], link.target[:1])]
    return network or list(links)


def _diurnal(cluster: Cluster, rng: random.Random, length_s: float) -> Iterator[ClusterEvent]:
    phase_s = rng.uniform(0.0, DAY_S)
    links = _network_links(cluster)
    steps = int(length_s // DIURNAL_STEP_S)
    for step in range(steps + 1):
        time_s = step * DIURNAL_STEP_S
        day = (1.0 + math.cos(2.0 * math.pi * (time_s - phase_s) / DAY_S)) / 2.0
        for link in links:
            share = DIURNAL_LEAST + (1.0 - DIURNAL_LEAST) * day
            share *= 1.0 + rng.uniform(-DIURNAL_NOISE, DIURNAL_NOISE)
            yield _at(link, time_s, min(share, 1.0))


def _bursty(cluster: Cluster, rng: random.Random, length_s: float) -> Iterator[ClusterEvent]:
    for link in _network_links(cluster):
        now = rng.expovariate(1.0 / QUIET_S)
        while now < length_s:
            yield _at(link, now, rng.uniform(*BURST_SHARE))
            now += rng.expovariate(1.0 / BURST_S)
            yield from [_at(link, now, 1.0)] if now < length_s else []
            now += rng.expovariate(1.0 / QUIET_S)


def _flapping(cluster: Cluster, rng: random.Random, length_s: float) -> Iterator[ClusterEvent]:
    for link in _network_links(cluster):
        now = rng.expovariate(1.0 / STEADY_S)
        while now < length_s:
            for _ in range(FLAPS):
                for share in (FLAP_SHARE, 1.0):
                    if now < length_s:
                        yield _at(link, now, share)
                    now += rng.expovariate(1.0 / FLAP_S)
            now += rng.expovariate(1.0 / STEADY_S)


def _preemption(cluster: Cluster, rng: random.Random, length_s: float) -> Iterator[ClusterEvent]:
    for index in range(len(cluster.nodes)):
        now, node = rng.expovariate(1.0 / STAY_S), f"n{index}"
        while now < length_s:
            if now > NOTICE_S:
                yield Notice(time_s=now - NOTICE_S, node=node, lost_at_s=now)
            yield NodeLost(time_s=now, node=node)
            # A node is absent for longer than the notice, so that a notice comes while the node is present.
            now += NOTICE_S + rng.expovariate(1.0 / AWAY_S)
            if now < length_s:
                yield NodeJoined(time_s=now, node=node)
            now += NOTICE_S + rng.expovariate(1.0 / STAY_S)


def _slowdown(cluster: Cluster, rng: random.Random, length_s: float) -> Iterator[ClusterEvent]:
    for rank in range(cluster.devices):
        now = rng.expovariate(1.0 / WELL_S)
        while now < length_s:
            yield Slowdown(time_s=now, where=f"d{rank}", speed=rng.uniform(*SLOW_SPEED))
            now += rng.expovariate(1.0 / SLOW_S)
            yield from [Slowdown(time_s=now, where=f"d{rank}", speed=1.0)] if now < length_s else []
            now += rng.expovariate(1.0 / WELL_S)


def _at(link: Link, time_s: float, share: float) -> LinkChange:
    return LinkChange(time_s=time_s, link=link.name, bytes_per_s=link.capacity.at(0.0) * share)


EVENT_KINDS: Mapping[str, Callable[[Cluster, random.Random, float], Iterator[ClusterEvent]]] = {
    "diurnal": _diurnal,
    "bursty": _bursty,
    "flapping": _flapping,
    "preemption": _preemption,
    "slowdown": _slowdown,
}
"""Kinds of generated traces."""
