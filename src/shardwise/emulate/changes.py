"""What an event trace changes while the command runs: bandwidths of links, shares of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.cluster import Cluster, EventTrace, LinkChange, Slowdown
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """At `time_s` after the start, `link` gets `value` bytes per second, or each of `ranks` that speed."""

    time_s: float
    value: float
    link: str | None = None
    ranks: tuple[int, ...] = ()


def changes_of(trace: EventTrace, cluster: Cluster) -> list[Change]:
    """The changes of a trace, in order. ConfigError for events that are not emulated."""
    if trace.nodes != len(cluster.nodes) or trace.absent:
        raise ConfigError(
            "is for another cluster", key="--events",
            found=f"{trace.nodes} nodes, {len(trace.absent)} absent",
            allowed=f"{len(cluster.nodes)}, none absent",
        )  # fmt: skip
    return [_change(event, cluster) for event in trace.events]


def _change(event: object, cluster: Cluster) -> Change:
    if isinstance(event, Slowdown):
        ranks = _ranks_of(event.where, cluster)
        return Change(time_s=event.time_s, value=event.speed, ranks=ranks)
    if isinstance(event, LinkChange) and event.link is not None and event.bytes_per_s is not None:
        return Change(time_s=event.time_s, value=event.bytes_per_s, link=event.link)
    raise ConfigError(
        "is not emulated", key="--events", found=type(event).__name__,
        allowed="the bandwidth of a link, the speed of a device or node",
    )  # fmt: skip


def _ranks_of(where: str, cluster: Cluster) -> tuple[int, ...]:
    number = int(where[1:])
    if where[0] == "d":
        return (number,)
    starts: Sequence[int] = [0, *accumulate(node.devices for node in cluster.nodes)]
    return tuple(range(starts[number], starts[number + 1]))
