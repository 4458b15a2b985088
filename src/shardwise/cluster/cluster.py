"""The records of a cluster: `Cluster` with its device classes, `Node`s, `Tier`s and `Link`s.

`Capacity` is the bandwidth of a link as a piecewise-constant function of time.
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
    """Bandwidth over time: `bytes_per_s[i]` from `times_s[i]` on. `times_s` starts at 0 and increases
    strictly."""

    times_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]

    @staticmethod
    def constant(bytes_per_s: float) -> Capacity:
        return Capacity((0.0,), (bytes_per_s,))

    def at(self, time_s: float) -> float:
        """Bytes per second at `time_s`; at a change, the new value."""
        return self.bytes_per_s[max(bisect_right(self.times_s, time_s) - 1, 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host with `devices` accelerators of one class. Equal nodes share their name.

    `speed` scales the computation of its devices (1 is nominal). `nics` network cards, each with
    `nic_bytes_per_s` per direction, serve all its devices. Host memory and the host link (bytes/s per device
    and direction) are for offload. `price_usd_per_hour` is the price of the whole node.
    `scale_up_bytes_per_s` (per device and direction) is set where it differs from the innermost tier.
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
    """One tier of a hierarchical fabric; tiers are listed from the innermost.

    `span` consecutive devices form one group of this tier; the last tier has one group of all devices. Inside
    a group every device can send, and receive at the same time, `bytes_per_s` while all of them do. That
    figure includes oversubscription and network cards that devices share. `flow_bytes_per_s` is the bandwidth
    of one device that sends alone. `latency_s` is one way, per hop. In a mixed cluster the figures are those
    of the weakest device or node. A tier with `is_network` goes through the network cards of the nodes. Where
    devices have direct links and no switch, `part_shares` lists pairs (members, share): a group with at least
    that many members of the tier reaches that share of `bytes_per_s`; the last pair that fits counts.
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
    """A directed link between two vertices of the link graph: devices (`d3`), nodes (`n0`) or switches."""

    name: str
    source: str
    target: str
    capacity: Capacity
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster: device classes, nodes in rank order, tiers, and the links of its file, if any.

    Rank r is the r-th device, counted through `nodes` in order. `assumptions` has the card's lines about
    defaults that were not given. Without `links`, the link graph follows from the tiers: see `link_graph` and
    `route`. `is_without_links` is true for a part of a cluster whose file gave links: the links are left out,
    since they may name devices outside the part.
    """

    name: str
    classes: Mapping[str, Device]
    nodes: tuple[Node, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...] = ()
    assumptions: tuple[str, ...] = ()
    is_without_links: bool = False
    devices: int = field(init=False)
    """Number of devices."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "devices", sum(node.devices * count for node, count in node_runs(self.nodes))
        )

    @property
    def vendors(self) -> Mapping[str, str]:
        """The vendor of the devices of each class."""
        return {name: device.vendor for name, device in self.classes.items()}

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes have the same class, speed and number of devices."""
        return len({(node.device_class, node.devices, node.speed) for node, _ in node_runs(self.nodes)}) == 1

    @property
    def has_links_as_tiers(self) -> bool:
        """Whether its file gave links, which the cost model approximates by tiers."""
        return self.is_without_links or bool(self.links)

    @property
    def priced_as(self) -> tuple[str, ...]:
        """Lines on what the cost model estimates instead of what the cluster's file gives; empty where it
        estimates the cluster as given.

        An answer with such lines proves nothing. A part of one device has no links, but the parts that it was
        compared with have, so it has the lines too."""
        if not self.has_links_as_tiers or (self.devices == 1 and not self.is_without_links):
            return ()
        rates = [
            f"{format_rate(tier.bytes_per_s)} "
            + (f"within {tier.span} devices" if tier.span < self.devices else f"between all {tier.span}")
            for tier in self.tiers
            if tier.span > 1
        ]
        count = {0: "tiers", 1: "1 tier: "}.get(len(rates), f"{len(rates)} tiers: ")
        order = "" if len(rates) > 2 else "the order of nodes in the file matters; "
        tiers = f"links are priced as {count}{', '.join(rates)}"
        return (f"{tiers}; {order}nothing is proven of the links themselves",)

    @property
    def price_usd_per_hour(self) -> float | None:
        """Price of all nodes; None where a node has no price."""
        total = 0.0
        for node, count in node_runs(self.nodes):
            if node.price_usd_per_hour is None:
                return None
            total += node.price_usd_per_hour * count
        return total


def node_runs(nodes: Iterable[Node]) -> tuple[tuple[Node, int], ...]:
    """Runs of consecutive nodes that are the same object, each with its length: 16,384 equal nodes are one
    run."""
    runs = (list(run) for _, run in groupby(nodes, key=id))
    return tuple((run[0], len(run)) for run in runs)
