"""Event traces as JSON lines: a head, then one event a line, in the order of time
(docs/reference/formats.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

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
from shardwise.inputs import Fields, parse_mapping, printable, read_text, short_repr

SCHEMA, VERSION = "shardwise.events", 1

MAX_TRACE_BYTES = 64 << 20
MAX_NODES = 1_000_000
KINDS = ("link", "sites", "slow", "lost", "joined", "notice")

_TIME = {"low": 0.0, "high": 1e10}


def load_events(path: str) -> tuple[EventTrace, str | None]:
    """The trace in the file at `path`, and what is to be said about it: a last line that is torn (it has no
    end and is no JSON) is dropped, and told. ConfigError names the first line that is wrong."""
    return parse_events(read_text(path, max_bytes=MAX_TRACE_BYTES), file=path)


def parse_events(text: str, *, file: str | None = None) -> tuple[EventTrace, str | None]:
    """The same for the text of a file."""
    where = printable(file) if file else None
    lines = text.split("\n")
    torn, whole = lines[-1], lines[:-1]
    warning = None
    if torn.strip():
        if _is_object(torn):
            whole.append(torn)
        else:
            warning = f"{where or 'the trace'}: line {len(lines)} ends in its middle and is dropped"
    numbered = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if not numbered:
        raise ConfigError("is empty", file=where, allowed=f'{{"schema": "{SCHEMA}", ...}} and events')
    head, *event_lines = numbered
    trace = _head(_fields(head, file))
    events = tuple(_event(_fields(line, file)) for line in event_lines)
    trace = EventTrace(
        nodes=trace.nodes, events=events, absent=trace.absent, sites=trace.sites, source=trace.source
    )
    invalid = first_invalid_event(trace)
    if invalid is not None:
        raise ConfigError(invalid[1], file=where, key=f"line {event_lines[invalid[0]][0]}")
    return trace, warning


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _fields(numbered: tuple[int, str], file: str | None) -> Fields:
    """A line as a mapping; its errors name the line."""
    number, line = numbered
    try:
        mapping = parse_mapping(line if line.lstrip().startswith("{") else "", file="line.json")
    except ConfigError as error:
        found = short_repr(line.strip()[:60])
        raise ConfigError(
            f"is not a JSON object: {error.message}", file=printable(file) if file else None,
            key=f"line {number}", found=found, allowed="one event a line",
        ) from None  # fmt: skip
    return Fields(mapping, file=file, key=f"line {number}")


def _head(fields: Fields) -> EventTrace:
    schema, version = fields.text("schema"), fields.integer("version", low=1)
    if schema != SCHEMA or version > VERSION:
        raise fields.error("schema", "is not a trace of this version", found=f"{schema} {version}",
                           allowed=f"{SCHEMA} {VERSION}")  # fmt: skip
    nodes = fields.integer("nodes", low=1, high=MAX_NODES)
    sites: dict[str, tuple[str, ...]] = {}
    if fields.has("sites"):
        part = fields.mapping("sites")
        sites = {name: tuple(map(str, part.sequence(name, low=1))) for name in part.names}
        for node, count in Counter(node for members in sites.values() for node in members).items():
            if count > 1:
                raise fields.error("sites", "puts a node in two places", found=node, allowed="one site each")
    absent = frozenset(map(str, fields.sequence("absent"))) if fields.has("absent") else frozenset()
    known = {f"n{index}" for index in range(nodes)}
    named = {node for members in sites.values() for node in members} | absent
    if named - known:
        found = sorted(named - known)[0]
        raise fields.error("absent", "names a node that is none", found=found, allowed=f"n0 to n{nodes - 1}")
    source = fields.text("source", default="", max_length=1000) if fields.has("source") else ""
    fields.finish()
    return EventTrace(nodes=nodes, events=(), absent=absent, sites=sites, source=source)


def _event(fields: Fields) -> ClusterEvent:
    time_s = fields.number("time_s", **_TIME)
    kind = fields.choice("kind", KINDS)
    event: ClusterEvent
    if kind in ("link", "sites"):
        event = _link_change(fields, kind, time_s)
    elif kind == "slow":
        speed = fields.number("speed", low=0.0, high=1e3)
        event = Slowdown(time_s=time_s, where=fields.text("where"), speed=speed)
    elif kind == "notice":
        event = Notice(time_s=time_s, node=fields.text("node"), lost_at_s=fields.number("lost_at_s", **_TIME))
    elif kind == "lost" and fields.has("device"):
        event = DeviceLost(time_s=time_s, device=fields.text("device"))
    else:
        node = fields.text("node")
        event = (NodeLost if kind == "lost" else NodeJoined)(time_s=time_s, node=node)
    fields.finish()
    return event


def _link_change(fields: Fields, kind: str, time_s: float) -> LinkChange:
    rate = fields.number("bytes_per_s", low=0.0, high=1e15) if fields.has("bytes_per_s") else None
    latency = fields.number("latency_s", low=0.0, high=1e3) if fields.has("latency_s") else None
    if rate is None and latency is None:
        raise fields.error("bytes_per_s", "is missing", allowed="bytes_per_s, latency_s, or both")
    if kind == "link":
        return LinkChange(time_s=time_s, link=fields.text("link"), bytes_per_s=rate, latency_s=latency)
    first, second = map(str, fields.sequence("sites", low=2, high=2))
    return LinkChange(time_s=time_s, sites=(first, second), bytes_per_s=rate, latency_s=latency)


def events_text(trace: EventTrace) -> str:
    """The trace as `parse_events` reads it back."""
    head: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, "nodes": trace.nodes}
    if trace.absent:
        head["absent"] = sorted(trace.absent, key=lambda node: int(node[1:]))
    if trace.sites:
        head["sites"] = {name: list(members) for name, members in trace.sites.items()}
    if trace.source:
        head["source"] = trace.source
    return "".join(json.dumps(line) + "\n" for line in (head, *map(_line, trace.events)))


def _line(event: ClusterEvent) -> Mapping[str, object]:
    if isinstance(event, LinkChange):
        where: dict[str, object] = (
            {"kind": "link", "link": event.link}
            if event.sites is None
            else {"kind": "sites", "sites": list(event.sites)}
        )
        changed = {"bytes_per_s": event.bytes_per_s, "latency_s": event.latency_s}
        given = {name: value for name, value in changed.items() if value is not None}
        return {"time_s": event.time_s, **where, **given}
    if isinstance(event, Slowdown):
        return {"time_s": event.time_s, "kind": "slow", "where": event.where, "speed": event.speed}
    if isinstance(event, Notice):
        return {
            "time_s": event.time_s, "kind": "notice", "node": event.node, "lost_at_s": event.lost_at_s,
        }  # fmt: skip
    if isinstance(event, DeviceLost):
        return {"time_s": event.time_s, "kind": "lost", "device": event.device}
    kind = "lost" if isinstance(event, NodeLost) else "joined"
    return {"time_s": event.time_s, "kind": kind, "node": event.node}
