"""Event traces made from a seed: links that follow the day, fail in bursts or flap; nodes and devices that
come, go and slow. The same cluster, kind, length and seed give the same trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.events import (
    ClusterEvent,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
)
from shardwise.cluster.links import link_graph

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

DIURNAL_STEP_S, DIURNAL_LEAST, DIURNAL_NOISE = 900.0, 0.4, 0.05
"""Every quarter of an hour each link gets a bandwidth between 0.4 and 1 of its own, least at the same time of
day, give or take 5 %."""

QUIET_S, BURST_S, BURST_SHARE = 2 * HOUR_S, 600.0, (0.1, 0.5)
"""Means of the times between bursts of other traffic and of their length, and what they leave of a link."""

STEADY_S, FLAPS, FLAP_S, FLAP_SHARE = 6 * HOUR_S, 8, 20.0, 0.05
"""Mean time until a link starts to flap, how often it goes down then, mean seconds of each state, and what is
left of it when it is down."""

STAY_S, AWAY_S, NOTICE_S = 8 * HOUR_S, HOUR_S, 120.0
"""Means of how long a preemptible node stays and is away; a notice comes two minutes before."""

WELL_S, SLOW_S, SLOW_SPEED = 12 * HOUR_S, HOUR_S, (0.3, 0.9)
"""Means of how long a device is at its nominal speed and is slow, and how slow."""


def generate_events(cluster: Cluster, kind: str, *, length_s: float, seed: int) -> EventTrace:
    """A trace of one of `EVENT_KINDS` for a cluster, `length_s` long."""
    rng = random.Random(f"{kind} {seed}")
    events = sorted(EVENT_KINDS[kind](cluster, rng, length_s), key=lambda event: event.time_s)
    source = f"shardwise events generate {kind}, seed {seed}, {length_s:g} s, for {cluster.name}"
    return EventTrace(nodes=len(cluster.nodes), events=tuple(events), source=source[:1000])


def _network_links(cluster: Cluster) -> list[Link]:
    """The links between nodes and switches; all, where there are none such."""
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
            # A node is away for longer than the notice, so that each is told while it is there.
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
"""The kinds of traces that can be made."""
