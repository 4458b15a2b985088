"""Availability of real cloud devices and links between regions, as others have recorded them, made event
traces.

Four forms of CSV are read: `milliseconds,add|remove,node` (no header), `date, time, count` of devices (no
header), a header with `Timestamp` and one column of counts per zone, and what lies between pairs of regions
(`PAIRS` is its header).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TypeVar

from shardwise.cluster.events import ClusterEvent, EventTrace, LinkChange, NodeJoined, NodeLost
from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_text, short_repr

Row = TypeVar("Row", tuple[float, bool, str], tuple[float, int], tuple[float, list[int]])
"""A change or a count, with its time first."""

Rows = list[tuple[int, list[str]]]
"""Lines of the file with their numbers, split at commas."""

PAIRS = ["region_a", "region_b", "delay_ms", "bandwidth_gbit_per_s"]
"""Of regions: the one-way delay and the bandwidth in each direction between two of them."""

MAX_CSV_BYTES = 64 << 20
MAX_CONVERTED_NODES = 100_000


def convert_events(path: str, *, per_node: int) -> tuple[EventTrace, list[str]]:
    """The trace in the CSV at `path`, counted from its first line, and what is to be said about it. Counts of
    devices become nodes of `per_node` devices: of n nodes the first n are there. ConfigError names the line
    that is wrong."""
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
        "is no availability trace that is known", file=where, key="line 1",
        found=short_repr(",".join(first)[:60]),
        allowed="ms,add|remove,node; date,time,count; or a header with Timestamp, or of region_a",
    )  # fmt: skip


def _from_nodes(rows: Rows, where: str) -> tuple[EventTrace, list[str]]:
    """Nodes by name, numbered as they first come; a node that is added while it is there, or removed while it
    is not, is skipped and told."""
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
        notes.append(f"{skipped} lines add a node that is there or remove one that is not: skipped")
    absent = frozenset(names.values())
    return _trace(len(names), events, absent, where), notes


def _from_counts(
    rows: Iterable[tuple[int, Sequence[object]]], per_node: int, where: str
) -> tuple[EventTrace, list[str]]:
    """One count of devices a line, by seconds."""
    counts = []
    for number, row in rows:
        if len(row) != 2 or not isinstance(row[0], float) or not re.fullmatch(r"\d{1,9}", str(row[1])):
            raise _wrong(list(map(str, row)), number, where, "date,time,count")
        counts.append((row[0], int(str(row[1])) // per_node))
    ordered, notes = _sorted(counts)
    return _trace_of_counts([(time_s, [nodes]) for time_s, nodes in ordered], where), notes


def _from_zones(rows: Rows, per_node: int, where: str) -> tuple[EventTrace, list[str]]:
    """One column of counts per zone; zones are sites of the trace."""
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
    """Regions are sites of one node each, numbered as they first come, and have their links from the start
    on."""
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
    """Of the nodes of each zone, numbered one zone after another, the first so many are there."""
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
    """By time, those of one time as they stood; and how many stood later than they should."""
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
        "is no line of such a trace", file=where, key=f"line {number}", found=found, allowed=allowed
    )
