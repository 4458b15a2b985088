"""What an event trace changes while the command runs: bandwidths of links, shares of devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardwise.cluster import Cluster, EventTrace, LinkChange, Slowdown
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedChange:
    """At `time_s` after the start, `link` gets `value` bytes per second, or each of `ranks` that speed."""

    time_s: float
    value: float
    link: str | None = None
    ranks: tuple[int, ...] = ()


def changes_of(trace: EventTrace, cluster: Cluster) -> list[EmulatedChange]:
    """The changes of a trace, in order. ConfigError for events that are not emulated."""
    if trace.nodes != len(cluster.nodes) or trace.absent:
        raise ConfigError(
            "is for another cluster", key="--events",
            found=f"{trace.nodes} nodes, {len(trace.absent)} absent",
            allowed=f"{len(cluster.nodes)}, none absent",
        )  # fmt: skip
    shares: dict[str, float] = {}
    found: list[EmulatedChange] = []
    for event in trace.events:
        if isinstance(event, Slowdown):
            shares[event.where] = event.speed
            found += _slowed(event, shares, cluster)
        else:
            found.append(_change(event))
    return found


def _slowed(event: Slowdown, shares: Mapping[str, float], cluster: Cluster) -> Iterator[EmulatedChange]:
    """The devices that are touched, each at the product of its own speed and its node's, as it is planned."""
    starts = [0, *accumulate(node.devices for node in cluster.nodes)]
    number = int(event.where[1:])
    node = number if event.where[0] == "n" else bisect_right(starts, number) - 1
    touched = range(starts[node], starts[node + 1]) if event.where[0] == "n" else (number,)
    by_speed: dict[float, list[int]] = {}
    for rank in touched:
        speed = shares.get(f"n{node}", 1.0) * shares.get(f"d{rank}", 1.0)
        by_speed.setdefault(speed, []).append(rank)
    for speed, ranks in by_speed.items():
        yield EmulatedChange(time_s=event.time_s, value=speed, ranks=tuple(ranks))


def _change(event: object) -> EmulatedChange:
    if isinstance(event, LinkChange) and event.link is not None and event.bytes_per_s is not None:
        return EmulatedChange(time_s=event.time_s, value=event.bytes_per_s, link=event.link)
    raise ConfigError(
        "is not emulated", key="--events", found=type(event).__name__,
        allowed="the bandwidth of a link, the speed of a device or node",
    )  # fmt: skip
