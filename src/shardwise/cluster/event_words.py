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
    first_invalid_event,
)
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.units import parse_quantity

ALLOWED = (
    "lost n3 or d9, joined n3, notice n3, slow n5 or d9 0.5, link n0>s1g0 5GB/s, latency n0>s1g0 2ms; "
    "joined by ;"
)

DEFAULT_NOTICE_S = 120.0
"""What spot instances are told ahead."""


def events_from_text(text: str, nodes: int) -> EventTrace:
    """The events that `text` lists, all at time 0, on a cluster of so many nodes of which those that join are
    absent at first. ConfigError names the event that is wrong."""
    events = [_event_from_words(part.split()) for part in re.split(r"[;\n]", text) if part.strip()]
    if not events:
        raise ConfigError("names no event", key="--events", found=short_repr(text), allowed=ALLOWED)
    first = {
        event.node: event
        for event in reversed(events)
        if not isinstance(event, LinkChange | Slowdown | DeviceLost)
    }
    absent = frozenset(node for node, event in first.items() if isinstance(event, NodeJoined))
    trace = EventTrace(nodes=nodes, events=tuple(events), absent=absent, source="events in words")
    invalid = first_invalid_event(trace)
    if invalid is not None:
        raise ConfigError(f"event {invalid[0] + 1} {invalid[1]}", key="--events", found=short_repr(text))
    return trace


def _event_from_words(words: list[str]) -> ClusterEvent:
    kind, *arguments = words
    if (
        kind in ("lost", "joined", "notice")
        and len(arguments) == 1
        and re.fullmatch(r"n\d{1,7}", arguments[0])
    ):
        if kind == "notice":
            return Notice(time_s=0.0, node=arguments[0], lost_at_s=DEFAULT_NOTICE_S)
        return (NodeLost if kind == "lost" else NodeJoined)(time_s=0.0, node=arguments[0])
    if kind == "lost" and len(arguments) == 1 and re.fullmatch(r"d\d{1,9}", arguments[0]):
        return DeviceLost(time_s=0.0, device=arguments[0])
    if kind == "slow" and re.fullmatch(r"[nd]\d{1,9} \d{1,3}(\.\d{1,9})?", " ".join(arguments)):
        return Slowdown(time_s=0.0, where=arguments[0], speed=float(arguments[1]))
    if kind == "link" and len(arguments) == 2:
        return LinkChange(time_s=0.0, link=arguments[0], bytes_per_s=_quantity(arguments[1], "B/s"))
    if kind == "latency" and len(arguments) == 2:
        return LinkChange(time_s=0.0, link=arguments[0], latency_s=_quantity(arguments[1], "s"))
    raise ConfigError(
        "is no event that is known", key="--events", found=short_repr(" ".join(words)), allowed=ALLOWED
    )


def _quantity(text: str, unit: str) -> float:
    try:
        value = parse_quantity(text, unit)
    except ConfigError as error:
        raise ConfigError(error.message, key="--events", found=short_repr(text), allowed=ALLOWED) from None
    if value < 0.0:
        raise ConfigError("is negative", key="--events", found=short_repr(text), allowed=ALLOWED)
    return value
