"""Reads and writes event traces.

`load_events` and `events_text` use JSON lines: a header, then one event per line in the order of time
(docs/reference/formats.md). `events_from_text` reads events of a command line:
`lost n3; slow n5 0.5; link n0>s1g0 5GB/s`. `convert_events` converts published CSV traces of cloud
availability. Two of its formats have no header: `milliseconds,add|remove,node`, and `date, time, count` of
devices. The others have a header with `Timestamp` and a column of counts per zone, or the header `PAIRS` of
links between regions.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, TypeVar

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
from shardwise.inputs import Fields, parse_mapping, printable, read_text, short_repr, unknown
from shardwise.units import parse_quantity

# JSON lines
SCHEMA, VERSION = "shardwise.events", 1

MAX_TRACE_BYTES = 64 << 20
MAX_NODES = 1_000_000
KINDS = ("link", "sites", "slow", "lost", "joined", "notice")

MAX_SPEED, MAX_RATE = 1e3, 1e15
"""Largest speed of a device relative to its nominal one, and largest bandwidth of a link in bytes/s."""

_TIME = {"low": 0.0, "high": 1e10}


def load_events(path: str) -> tuple[EventTrace, str | None]:
    """The trace in the file at `path`, and a warning or None.

    An incomplete last line is dropped with a warning. ConfigError names the first wrong line."""
    return parse_events(read_text(path, max_bytes=MAX_TRACE_BYTES), file=path)


def parse_events(text: str, *, file: str | None = None) -> tuple[EventTrace, str | None]:
    """`load_events` for the text of a file."""
    where = printable(file) if file else None
    lines = text.split("\n")
    torn, whole = lines[-1], lines[:-1]
    warning = None
    if torn.strip():
        if _is_object(torn):
            whole.append(torn)
        else:
            warning = f"{where or 'the trace'}: line {len(lines)} is incomplete and is dropped"
    numbered = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if not numbered:
        raise ConfigError("is empty", file=where, allowed=f'{{"schema": "{SCHEMA}", ...}} and events')
    head, *event_lines = numbered
    trace = _head(_fields(head, file))
    events = tuple(_plain_event(line[1]) or _event(_fields(line, file)) for line in event_lines)
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
    """The fields of a line, parsed as a JSON object. Errors give the number of the line."""
    number, line = numbered
    try:
        mapping = parse_mapping(line if line.lstrip().startswith("{") else "", file="line.json")
    except ConfigError as error:
        found = short_repr(line.strip()[:60])
        raise ConfigError(
            f"is not a JSON object: {error.message}", file=printable(file) if file else None,
            key=f"line {number}", found=found, allowed="one event per line",
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
                raise fields.error(
                    "sites", "has a node on two sites", found=node, allowed="one site per node"
                )
    absent = frozenset(map(str, fields.sequence("absent"))) if fields.has("absent") else frozenset()
    known = {f"n{index}" for index in range(nodes)}
    named = {node for members in sites.values() for node in members} | absent
    if named - known:
        found = sorted(named - known)[0]
        raise fields.error("absent", "names an unknown node", found=found, allowed=f"n0 to n{nodes - 1}")
    source = fields.text("source", default="", max_length=1000) if fields.has("source") else ""
    fields.finish()
    return EventTrace(nodes=nodes, events=(), absent=absent, sites=sites, source=source)


_NAME = r'"([A-Za-z0-9_.:>-]{1,100})"'
_VALUE = r"((?:0|[1-9]\d{0,14})(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?)"
_PLAIN = re.compile(
    rf'\{{"time_s": {_VALUE}, "kind": "(?:'
    rf'(lost|joined)", "node": {_NAME}|notice", "node": {_NAME}, "lost_at_s": {_VALUE}|'
    rf'slow", "where": {_NAME}, "speed": {_VALUE}|link", "link": {_NAME}, "bytes_per_s": {_VALUE})\}}'
)
"""A line as `events_text` writes it, with plain names and numbers."""


def _plain_event(line: str) -> ClusterEvent | None:
    """The event of a plain line, without the checks of each key and value, which take most of the time of a
    long trace; None for any other line, and for a value out of range."""
    match = _PLAIN.fullmatch(line)
    if match is None:
        return None
    time, kind, node, noticed, lost_at, where, speed, link, rate = match.groups()
    time_s = float(time)
    if time_s > _TIME["high"]:
        return None
    if node is not None:
        return (NodeLost if kind == "lost" else NodeJoined)(time_s=time_s, node=node)
    if noticed is not None:
        lost_at_s = float(lost_at)
        return (
            Notice(time_s=time_s, node=noticed, lost_at_s=lost_at_s) if lost_at_s <= _TIME["high"] else None
        )
    if where is not None:
        return Slowdown(time_s=time_s, where=where, speed=float(speed)) if float(speed) <= MAX_SPEED else None
    is_in_range = float(rate) <= MAX_RATE
    return LinkChange(time_s=time_s, link=link, bytes_per_s=float(rate)) if is_in_range else None


def _event(fields: Fields) -> ClusterEvent:
    time_s = fields.number("time_s", **_TIME)
    kind = fields.choice("kind", KINDS)
    event: ClusterEvent
    if kind in ("link", "sites"):
        event = _link_change(fields, kind, time_s)
    elif kind == "slow":
        speed = fields.number("speed", low=0.0, high=MAX_SPEED)
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
    rate = fields.number("bytes_per_s", low=0.0, high=MAX_RATE) if fields.has("bytes_per_s") else None
    latency = fields.number("latency_s", low=0.0, high=1e3) if fields.has("latency_s") else None
    if rate is None and latency is None:
        raise fields.error("bytes_per_s", "is missing", allowed="bytes_per_s, latency_s, or both")
    if kind == "link":
        return LinkChange(time_s=time_s, link=fields.text("link"), bytes_per_s=rate, latency_s=latency)
    first, second = map(str, fields.sequence("sites", low=2, high=2))
    return LinkChange(time_s=time_s, sites=(first, second), bytes_per_s=rate, latency_s=latency)


def events_text(trace: EventTrace) -> str:
    """The text of a trace, in the format of `parse_events`."""
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


# Events of a command line
WORDS = ("lost", "joined", "notice", "slow", "link", "latency")
ALLOWED = (
    "lost n3 or d9, joined n3, notice n3, slow n5 or d9 0.5, link n0>s1g0 5GB/s, latency n0>s1g0 2ms; "
    "separated by ;"
)

DEFAULT_NOTICE_S = 120.0
"""Time from a notice to the loss of a node in seconds, as cloud providers give for spot instances."""


def events_from_text(text: str, nodes: int) -> EventTrace:
    """The events that `text` lists, all at time 0, on a cluster of `nodes` nodes.

    Nodes whose first event is to join are absent at first. ConfigError names the wrong event."""
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
    found = short_repr(" ".join(words))
    raise unknown("is not a known event", kind, WORDS, key="--events", found=found, allowed=ALLOWED)


def _quantity(text: str, unit: str) -> float:
    try:
        value = parse_quantity(text, unit)
    except ConfigError as error:
        raise ConfigError(error.message, key="--events", found=short_repr(text), allowed=ALLOWED) from None
    if value < 0.0:
        raise ConfigError("is negative", key="--events", found=short_repr(text), allowed=ALLOWED)
    return value


# Published CSV traces
Row = TypeVar("Row", tuple[float, bool, str], tuple[float, int], tuple[float, list[int]])
"""A change or a count; its first value is the time."""

Rows = list[tuple[int, list[str]]]
"""Cells of the rows of a CSV file, with line numbers."""

PAIRS = ["region_a", "region_b", "delay_ms", "bandwidth_gbit_per_s"]
"""Header of a CSV of region pairs: one-way delay, and bandwidth in each direction."""

MAX_CSV_BYTES = 64 << 20
MAX_CONVERTED_NODES = 100_000


def convert_events(path: str, *, per_node: int) -> tuple[EventTrace, list[str]]:
    """The trace in the CSV file at `path`, with time 0 at its first line, and notes.

    Counts of devices become nodes of `per_node` devices: for a count of n nodes, the first n are present.
    ConfigError names the wrong line."""
    text, where = read_text(path, max_bytes=MAX_CSV_BYTES), printable(path)
    reader = csv.reader(text.splitlines())
    try:
        rows: Rows = [
            (number, [cell.strip() for cell in row])
            for number, row in enumerate(reader, start=1)
            if any(cell.strip() for cell in row)
        ]
    except csv.Error as error:
        raise ConfigError(f"is not a CSV file: {error}", file=where, key=f"line {reader.line_num}") from None
    if not rows:
        raise ConfigError("is empty", file=where, allowed="a CSV of availability")
    first = rows[0][1]
    if len(first) == 3 and first[1] in ("add", "remove"):
        return _from_nodes(rows, where)
    if len(first) == 3 and re.fullmatch(r"\d{4}-\d{2}-\d{2}", first[0]):
        return _from_counts([(n, [_clock_s(row, n, where), *row[2:]]) for n, row in rows], per_node, where)
    if "Timestamp" in first:
        return _from_zones(rows, per_node, where)
    if first == PAIRS:
        return _from_pairs(rows, where)
    raise ConfigError(
        "is not a known availability trace", file=where, key="line 1",
        found=short_repr(",".join(first)[:60]),
        allowed="ms,add|remove,node; date,time,count; or a header with Timestamp, or of region_a",
    )  # fmt: skip


def _from_nodes(rows: Rows, where: str) -> tuple[EventTrace, list[str]]:
    """A trace of named nodes, numbered in the order of their first line.

    Lines that add a present node or remove an absent one are skipped, with a note."""
    changes: list[tuple[float, bool, str]] = []
    for number, row in rows:
        if len(row) != 3 or row[1] not in ("add", "remove") or not re.fullmatch(r"\d{1,15}", row[0]):
            raise _wrong(row, number, where, "milliseconds,add|remove,node")
        changes.append((int(row[0]) / 1000.0, row[1] == "add", row[2]))
    ordered, notes = _sorted(changes)
    names = {name: f"n{index}" for index, name in enumerate(dict.fromkeys(name for _, _, name in ordered))}
    start_s = ordered[0][0]
    events: list[ClusterEvent] = []
    there: set[str] = set()
    skipped = 0
    for time_s, is_added, name in ordered:
        node = names[name]
        if is_added == (node in there):
            skipped += 1
            continue
        there ^= {node}
        kind = NodeJoined if is_added else NodeLost
        events.append(kind(time_s=time_s - start_s, node=node))
    if skipped:
        notes.append(f"{skipped} lines add a present node or remove an absent one: skipped")
    absent = frozenset(names.values())
    return _trace(len(names), events, absent, where), notes


def _from_counts(
    rows: Iterable[tuple[int, Sequence[object]]], per_node: int, where: str
) -> tuple[EventTrace, list[str]]:
    """A trace from rows of a time in seconds and a count of devices."""
    counts = []
    for number, row in rows:
        if len(row) != 2 or not isinstance(row[0], float) or not re.fullmatch(r"\d{1,9}", str(row[1])):
            raise _wrong(list(map(str, row)), number, where, "date,time,count")
        counts.append((row[0], int(str(row[1])) // per_node))
    ordered, notes = _sorted(counts)
    return _trace_of_counts([(time_s, [nodes]) for time_s, nodes in ordered], where), notes


def _from_zones(rows: Rows, per_node: int, where: str) -> tuple[EventTrace, list[str]]:
    """A trace from one column of counts per zone; zones become sites."""
    head = rows[0][1]
    clock = head.index("Timestamp")
    zones = [place for place, name in enumerate(head) if name and place != clock]
    found: list[tuple[float, list[int]]] = []
    for number, row in rows[1:]:
        cells = [row[place] if place < len(row) else "" for place in (clock, *zones)]
        if not all(re.fullmatch(r"\d{1,15}(\.\d{1,15})?", cell) for cell in cells):
            raise _wrong(row, number, where, ",".join(head))
        found.append((float(cells[0]), [int(float(cell)) // per_node for cell in cells[1:]]))
    if not found:
        raise ConfigError("has no counts", file=where, allowed="lines below its header")
    ordered, notes = _sorted(found)
    return _trace_of_counts(ordered, where, [head[place] for place in zones]), notes


def _from_pairs(rows: Rows, where: str) -> tuple[EventTrace, list[str]]:
    """A trace of the links between regions, which apply from time 0.

    A region becomes a site of one node; nodes are numbered in the order of their first line."""
    changes: dict[tuple[str, str], LinkChange] = {}
    for number, row in rows[1:]:
        figures = row[2:] if len(row) == len(PAIRS) else []
        if not figures or not all(re.fullmatch(r"\d{1,9}(\.\d{1,9})?", cell) for cell in figures):
            raise _wrong(row, number, where, ",".join(PAIRS))
        pair = row[0], row[1]
        if row[0] == row[1] or pair in changes or pair[::-1] in changes or not float(row[3]):
            raise _wrong(row, number, where, "two regions, once, with a bandwidth above 0")
        changes[pair] = LinkChange(
            time_s=0.0, sites=pair, bytes_per_s=float(row[3]) * 1e9 / 8.0, latency_s=float(row[2]) / 1000.0
        )
    names = list(dict.fromkeys(name for pair in changes for name in pair))
    trace = _trace(len(names), list(changes.values()), frozenset(), where)
    return replace(trace, sites={name: (f"n{index}",) for index, name in enumerate(names)}), []


def _trace_of_counts(
    counts: Sequence[tuple[float, list[int]]], where: str, zones: Sequence[str] = ()
) -> EventTrace:
    """A trace from counts of nodes per zone. Nodes are numbered zone by zone; for a count of n, the first n
    nodes of the zone are present."""
    most = [max(row[zone] for _, row in counts) for zone in range(len(counts[0][1]))]
    firsts = [sum(most[:zone]) for zone in range(len(most))]
    if sum(most) > MAX_CONVERTED_NODES:
        raise ConfigError(
            "has too many nodes", file=where, found=str(sum(most)), allowed=str(MAX_CONVERTED_NODES)
        )
    start_s, before = counts[0]
    events: list[ClusterEvent] = []
    for time_s, row in counts[1:]:
        for first, old, new in zip(firsts, before, row, strict=True):
            at = time_s - start_s
            events += [NodeLost(time_s=at, node=f"n{first + i}") for i in reversed(range(new, old))]
            events += [NodeJoined(time_s=at, node=f"n{first + i}") for i in range(old, new)]
        before = row
    absent = frozenset(
        f"n{first + i}"
        for first, old, top in zip(firsts, counts[0][1], most, strict=True)
        for i in range(old, top)
    )
    sites = {
        zone: tuple(f"n{first + i}" for i in range(top))
        for zone, first, top in zip(zones, firsts, most, strict=True)
        if top
    } if zones else {}  # fmt: skip
    trace = _trace(sum(most), events, absent, where)
    return EventTrace(nodes=trace.nodes, events=trace.events, absent=absent, sites=sites, source=trace.source)


def _trace(nodes: int, events: Sequence[ClusterEvent], absent: frozenset[str], where: str) -> EventTrace:
    if nodes == 0:
        raise ConfigError("never has a node", file=where, allowed="counts of at least --per-node devices")
    name = where.rsplit("/", maxsplit=1)[-1]
    return EventTrace(nodes=nodes, events=tuple(events), absent=absent, source=f"converted from {name}")


def _sorted(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """The rows in the order of time (stable), and a note on the number of rows that were out of order."""
    late = sum(later[0] < row[0] for row, later in pairwise(rows))
    notes = [f"{late} lines are earlier than the one before them: sorted by time"] if late else []
    return sorted(rows, key=lambda row: row[0]), notes


def _clock_s(row: list[str], number: int, where: str) -> float:
    try:
        return datetime.strptime(f"{row[0]} {row[1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except (ValueError, IndexError):
        raise _wrong(row, number, where, "2021-12-10, 13:07:45, 80") from None


def _wrong(row: Sequence[str], number: int, where: str, allowed: str) -> ConfigError:
    found = short_repr(",".join(row)[:60])
    return ConfigError(
        "does not fit the trace's format", file=where, key=f"line {number}", found=found, allowed=allowed
    )
