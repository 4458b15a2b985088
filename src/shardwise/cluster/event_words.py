"""A few events in words, as one writes them on a command line: `lost n3; slow n5 0.5; link n0>s1g0 5GB/s`."""

from __future__ import annotations

import re

from shardwise.cluster.events import (
    ClusterEvent,
    DeviceLost,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
    first_fault,
)
from shardwise.errors import ConfigError
from shardwise.inputs import shown
from shardwise.units import parse_quantity

ALLOWED = (
    "lost n3 or d9, joined n3, notice n3, slow n5 or d9 0.5, link n0>s1g0 5GB/s, latency n0>s1g0 2ms; "
    "joined by ;"
)

NOTICE_S = 120.0
"""What spot instances are told ahead."""


def events_in_words(text: str, nodes: int) -> EventTrace:
    """The events that `text` lists, all at time 0, on a cluster of so many nodes of which those that join are
    absent at first. ConfigError names the event that is wrong."""
    events = [_event(part.split()) for part in re.split(r"[;\n]", text) if part.strip()]
    if not events:
        raise ConfigError("names no event", key="--events", found=shown(text), allowed=ALLOWED)
    first = {
        event.node: event
        for event in reversed(events)
        if not isinstance(event, LinkChange | Slowdown | DeviceLost)
    }
    absent = frozenset(node for node, event in first.items() if isinstance(event, NodeJoined))
    trace = EventTrace(nodes=nodes, events=tuple(events), absent=absent, source="events in words")
    fault = first_fault(trace)
    if fault is not None:
        raise ConfigError(f"event {fault[0] + 1} {fault[1]}", key="--events", found=shown(text))
    return trace


def _event(words: list[str]) -> ClusterEvent:
    kind, *rest = words
    if kind in ("lost", "joined", "notice") and len(rest) == 1 and re.fullmatch(r"n\d{1,7}", rest[0]):
        if kind == "notice":
            return Notice(time_s=0.0, node=rest[0], lost_at_s=NOTICE_S)
        return (NodeLost if kind == "lost" else NodeJoined)(time_s=0.0, node=rest[0])
    if kind == "lost" and len(rest) == 1 and re.fullmatch(r"d\d{1,9}", rest[0]):
        return DeviceLost(time_s=0.0, device=rest[0])
    if kind == "slow" and re.fullmatch(r"[nd]\d{1,9} \d{1,3}(\.\d{1,9})?", " ".join(rest)):
        return Slowdown(time_s=0.0, where=rest[0], speed=float(rest[1]))
    if kind == "link" and len(rest) == 2:
        return LinkChange(time_s=0.0, link=rest[0], bytes_per_s=_quantity(rest[1], "B/s"))
    if kind == "latency" and len(rest) == 2:
        return LinkChange(time_s=0.0, link=rest[0], latency_s=_quantity(rest[1], "s"))
    raise ConfigError(
        "is no event that is known", key="--events", found=shown(" ".join(words)), allowed=ALLOWED
    )


def _quantity(text: str, unit: str) -> float:
    try:
        value = parse_quantity(text, unit)
    except ConfigError as error:
        raise ConfigError(error.message, key="--events", found=shown(text), allowed=ALLOWED) from None
    if value < 0.0:
        raise ConfigError("is negative", key="--events", found=shown(text), allowed=ALLOWED)
    return value
