"""What happens to a cluster over time: links that change, devices that slow, nodes that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.links import link_graph
from shardwise.errors import ConfigError

MAX_DIGITS = 12
"""Digits of the number of a node or device, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """From `time_s` on, a link has another bandwidth or latency (None: as before).

    The link is one of the link graph (`n0>s1g0`), or all that leads from one site of the trace to another and
    back (`sites`); one of the two is given.
    """

    time_s: float
    link: str | None = None
    sites: tuple[str, str] | None = None
    bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `time_s` on, a device (`d5`) or all devices of a node (`n3`) run at `speed` times their nominal
    speed; 1 is nominal."""

    time_s: float
    where: str
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """At `time_s` a node is gone, with all that is on it."""

    time_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost:
    """At `time_s` a device (`d5`) is gone; what else is on its node is there. Plans are made node by node:
    see `events_of_nodes`."""

    time_s: float
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """At `time_s` a node that was absent can be used, empty."""

    time_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """At `time_s` it is told that a node will be lost at `lost_at_s`; it may stay after all."""

    time_s: float
    node: str
    lost_at_s: float


ClusterEvent = LinkChange | Slowdown | NodeLost | DeviceLost | NodeJoined | Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTrace:
    """Events in the order of their times, on nodes `n0` to `n(nodes - 1)`, of which `absent` are not there at
    first. `sites` maps names to nodes. `source` says where it is from."""

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
        """From when which nodes are there: at 0, and whenever that changes."""
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
    """The place and the text of the first event that cannot follow those before it; None where all can.

    A node may join after the loss of a device: the cluster says which node that device is of.
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
                return place, f"names {event.device}, which is no device d0, d1, ..."
        node = getattr(event, "node", None)
        if node is not None and not _is_node(node, trace.nodes):
            return place, f"names {node}, which is none of n0 to n{trace.nodes - 1}"
        if isinstance(event, NodeLost | Notice) and event.node not in there:
            return place, f"names {event.node}, which is lost already or never joined"
        if isinstance(event, NodeLost):
            there.remove(event.node)
        if isinstance(event, NodeJoined):
            if event.node in there and not lacks_devices:
                return place, f"lets {event.node} join, which is there already"
            there.add(event.node)
        if isinstance(event, Notice) and event.lost_at_s < event.time_s:
            return place, "gives notice of what is past"
        if isinstance(event, LinkChange) and event.sites is not None:
            unknown = [site for site in event.sites if site not in trace.sites]
            if unknown or event.sites[0] == event.sites[1]:
                return place, f"names the sites {' and '.join(event.sites)}; known: {', '.join(trace.sites)}"
    return None


def _is_node(name: str, nodes: int) -> bool:
    return name[:1] == "n" and _is_number_below(name[1:], nodes)


def _is_number_below(text: str, count: int) -> bool:
    """Whether it is the plain form of a number from 0 to before `count`."""
    is_plain = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return is_plain and str(int(text)) == text and int(text) < count


def check_events(trace: EventTrace, cluster: Cluster, *, file: str | None = None) -> None:
    """ConfigError where a trace does not belong to a cluster: other nodes, or a link or device that it does
    not have."""
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
                f"is no node or device of the cluster (event {place})", file=file, key="where",
                found=event.where, allowed=allowed,
            )  # fmt: skip
        if isinstance(event, DeviceLost) and not _is_place(event.device, cluster):
            raise ConfigError(
                f"is no device of the cluster (event {place})", file=file, key="device",
                found=event.device, allowed=f"d0 to d{cluster.devices - 1}",
            )  # fmt: skip


def _names_links(events: Iterable[ClusterEvent]) -> bool:
    return any(isinstance(event, LinkChange) and event.link is not None for event in events)


def _is_place(where: str, cluster: Cluster) -> bool:
    count = {"n": len(cluster.nodes), "d": cluster.devices}.get(where[:1], 0)
    return _is_number_below(where[1:], count)
