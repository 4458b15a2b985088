"""What a job runs on: device classes, nodes, and the links between them.

A link's capacity as a piecewise-constant function of time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from shardwise.cluster.device import Device
from shardwise.units import format_rate


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes per second from each instant of `times_s` on; `times_s` starts at 0 and increases strictly."""

    times_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]

    @staticmethod
    def constant(bytes_per_s: float) -> Capacity:
        return Capacity((0.0,), (bytes_per_s,))

    @property
    def is_constant(self) -> bool:
        return len(self.times_s) == 1

    def at(self, time_s: float) -> float:
        """Bytes per second at `time_s` (the value that starts there, at a change)."""
        return self.bytes_per_s[max(bisect_right(self.times_s, time_s) - 1, 0)]

    def next_change_s(self, time_s: float) -> float | None:
        """The first change strictly after `time_s`, or None."""
        index = bisect_right(self.times_s, time_s)
        return self.times_s[index] if index < len(self.times_s) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host: `devices` accelerators of one class, and what they share. Nodes that are alike share their
    name.

    `speed` scales the computation of its devices (1 is nominal). `nics` network cards of `nic_bytes_per_s`
    each and direction serve all its devices. Host memory and the host link (bytes/s per device and direction)
    are for offload. `price_usd_per_hour` is of the whole node. `scale_up_bytes_per_s` is given where its
    devices reach another figure, per device and direction, than the innermost tier says.
    """

    name: str
    device_class: str
    devices: int
    speed: float = 1.0
    nics: int
    nic_bytes_per_s: float
    host_memory_bytes: float
    host_link_bytes_per_s: float
    price_usd_per_hour: float | None = None
    scale_up_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level of a hierarchical fabric, innermost first.

    `span` consecutive devices form one group of this tier; the groups of the last tier hold all devices.
    Inside it every device can send (and at the same time receive) `bytes_per_s` when all of them do;
    oversubscription and cards shared on a node are already in that figure. `flow_bytes_per_s` is what one
    device alone can reach. `latency_s` is one way, per hop. In a mixed cluster the figures are the weakest.
    A network tier goes through the cards of the nodes. Where devices have links to each other and no switch,
    `part_shares` lists (members, share): a group of at least so many members of the tier, and fewer than the
    next entry's, reaches that share of `bytes_per_s`.
    """

    name: str
    span: int
    bytes_per_s: float
    flow_bytes_per_s: float
    latency_s: float
    in_switch_reduction: bool = False
    is_network: bool = False
    part_shares: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed capacity between two vertices (a device `d3`, a node `n0`, a switch) of the link graph."""

    name: str
    source: str
    target: str
    capacity: Capacity
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Classes, nodes in rank order, tiers, and the links of the file where it gives a link graph.

    Rank r is the r-th device, counting through `nodes` in order. `assumptions` are the lines that the card
    prints about what was customary rather than given. Without `links`, the tiers stand for a link graph:
    see `link_graph` and `route`. `is_without_links`: its file gave links, which are left out, since they name
    devices that this part of it may not have.
    """

    name: str
    classes: Mapping[str, Device]
    nodes: tuple[Node, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...] = ()
    assumptions: tuple[str, ...] = ()
    is_without_links: bool = False
    devices: int = field(init=False)
    """How many there are."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "devices", sum(node.devices * count for node, count in node_runs(self.nodes))
        )

    @property
    def vendors(self) -> Mapping[str, str]:
        """Who makes the devices of each class."""
        return {name: device.vendor for name, device in self.classes.items()}

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are alike: one class, one speed, one number of devices."""
        return len({(node.device_class, node.devices, node.speed) for node, _ in node_runs(self.nodes)}) == 1

    @property
    def has_links_as_tiers(self) -> bool:
        """Whether its file gave links, for which the tiers stand."""
        return self.is_without_links or bool(self.links)

    @property
    def priced_as(self) -> tuple[str, ...]:
        """What the cluster is priced as where that is not what its file says, a line each. An answer on it
        has these lines and proves nothing. One device that is a part of a cluster has none of the links, but
        what it was compared with has."""
        if not self.has_links_as_tiers or (self.devices == 1 and not self.is_without_links):
            return ()
        rates = [
            f"{format_rate(tier.bytes_per_s)} "
            + (f"within {tier.span} devices" if tier.span < self.devices else f"between all {tier.span}")
            for tier in self.tiers
            if tier.span > 1
        ]
        count = {0: "tiers", 1: "1 tier: "}.get(len(rates), f"{len(rates)} tiers: ")
        return (
            f"links are priced as {count}{', '.join(rates)}; the order of nodes in the file matters; "
            "nothing is proven of the links themselves",
        )

    @property
    def price_usd_per_hour(self) -> float | None:
        """Of all nodes together; None where one has no price."""
        total = 0.0
        for node, count in node_runs(self.nodes):
            if node.price_usd_per_hour is None:
                return None
            total += node.price_usd_per_hour * count
        return total


def node_runs(nodes: Iterable[Node]) -> tuple[tuple[Node, int], ...]:
    """Consecutive nodes that are the same record, each with its count: 16,384 alike nodes are one run."""
    runs = (list(run) for _, run in groupby(nodes, key=id))
    return tuple((run[0], len(run)) for run in runs)
