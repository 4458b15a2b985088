"""Trace files of simulated or measured steps: spans on tracks, arrows between them, counters.

`write_trace` writes Chrome's Trace Event Format (JSON), or Perfetto's native format where the name ends in
`.pftrace`; both open in Perfetto. `read_trace` reads the spans of a JSON trace. The native format is a
protobuf `Trace` of TrackEvent packets, written field by field. The field numbers are those of perfetto/trace
(perfetto.dev/docs/reference/trace-packet-proto). A protobuf message is a sequence of fields: a key (field
number and wire type) and a value (a varint, eight bytes, or a length and bytes).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import Fields, printable, read_bytes, read_mapping
from shardwise.plans import write_file
from shardwise.sim.engine import COMMUNICATION, COMPUTE, DATA_PARALLEL, Floats, Timeline

# Traces and their tracks

BLOCKS, OPERATORS, TRAFFIC = "blocks", "operators", "traffic"
"""Tracks of a step of an operator graph: passes of its blocks, passes of its operators, and
redistribution."""

_TRACK_ORDER = (COMPUTE, BLOCKS, OPERATORS, TRAFFIC, COMMUNICATION, DATA_PARALLEL)


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval from `start_s` to `finish_s` on a track of a rank."""

    rank: int
    track: str
    name: str
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """One span causes another; both are indices in `Trace.spans`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Counter:
    """A value of a rank, from each instant of `times_s` on."""

    rank: int
    name: str
    times_s: Sequence[float]
    nbytes: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The contents of a trace file. Overlapping spans of one track are drawn on several tracks."""

    spans: tuple[Span, ...]
    arrows: tuple[Arrow, ...] = ()
    counters: tuple[Counter, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """The name of a rank where it is not `rank N`."""
    plan_hash: str | None = None
    """Hash of the plan of this step, if known."""

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans} | {counter.rank for counter in self.counters})

    def name_of(self, rank: int) -> str:
        return self.names.get(rank, f"rank {rank}")

    def __post_init__(self) -> None:
        if any(not span.start_s <= span.finish_s for span in self.spans):
            raise InternalError("trace: a span ends before it starts")
        places = range(len(self.spans))
        if any(arrow.source not in places or arrow.target not in places for arrow in self.arrows):
            raise InternalError("trace: an arrow without a span")


@dataclass(frozen=True, slots=True)
class Track:
    """One row of the picture: spans by index, in order of time, without overlap."""

    rank: int
    name: str
    spans: tuple[int, ...]


def tracks_of(trace: Trace) -> list[Track]:
    """The tracks by rank; then compute, communication and data parallel; then others by name.

    Where spans of one track overlap, each goes on the first row that is free.
    """
    groups: dict[tuple[int, int, str], list[int]] = {}
    for place, span in enumerate(trace.spans):
        order = _TRACK_ORDER.index(span.track) if span.track in _TRACK_ORDER else len(_TRACK_ORDER)
        groups.setdefault((span.rank, order, span.track), []).append(place)
    tracks = []
    for (rank, _, name), places in sorted(groups.items()):
        for number, track_row in enumerate(_non_overlapping(trace, places), start=1):
            tracks.append(Track(rank, name if number == 1 else f"{name} {number}", tuple(track_row)))
    return tracks


def _non_overlapping(trace: Trace, places: Iterable[int]) -> list[list[int]]:
    track_rows: list[list[int]] = []
    free_s: list[float] = []
    for place in sorted(
        places, key=lambda place: (trace.spans[place].start_s, trace.spans[place].finish_s, place)
    ):
        span = trace.spans[place]
        number = next(
            (track_row for track_row, free in enumerate(free_s) if free <= span.start_s), len(track_rows)
        )
        if number == len(track_rows):
            track_rows.append([])
            free_s.append(0.0)
        track_rows[number].append(place)
        free_s[number] = span.finish_s
    return track_rows


def trace_of(timeline: Timeline, *, activations: Sequence[tuple[Floats, Floats]] = ()) -> Trace:
    """The trace of a simulated step; `activations` has instants and bytes per rank (see `activation_bytes`).

    Tasks of a rank without a stream (hops) are drawn as its communication; tasks of no rank are not drawn.
    """
    graph = timeline.graph
    ranks = graph.ranks.tolist()
    place_of: dict[int, int] = {}
    spans: list[Span] = []
    times = zip(timeline.start_s.tolist(), timeline.finish_s.tolist(), strict=True)
    for task, (start, finish) in enumerate(times):
        if ranks[task] >= 0:
            place_of[task] = len(spans)
            track = graph.streams[task] or COMMUNICATION
            spans.append(Span(ranks[task], track, graph.names[task], start, finish))
    arrows = [
        Arrow(place_of[source], place_of[target])
        for source, target in graph.sends.tolist()
        if source in place_of and target in place_of
    ]
    counters = [
        Counter(rank, "activations in flight", times.tolist(), nbytes.tolist())
        for rank, (times, nbytes) in enumerate(activations)
    ]
    return Trace(spans=tuple(spans), arrows=tuple(arrows), counters=tuple(counters))


# Reading

MAX_BYTES = 256 * 2**20
MAX_NODES = 20_000_000

_LOG = re.compile(rb'\s*\{\s*"step"\s*:')
"""The start of a step log, which is easily mistaken for a trace."""

_MAX_US = 1e13
"""Largest time or duration in a trace file, in microseconds: about a hundred days."""


def read_trace(path: str | PathLike[str]) -> Trace:
    """The spans of the trace at `path`, and the hash of its plan if present; arrows, counters and names are
    ignored.

    ConfigError where it is no such file, or has no spans.
    """
    name = fspath(path)
    if name.endswith(".pftrace"):
        raise ConfigError(
            "is in Perfetto's native format, which is not read", file=printable(name),
            allowed="a JSON trace, as --trace FILE.json writes",
        )  # fmt: skip
    if _LOG.match(read_bytes(name, max_bytes=MAX_BYTES)):
        raise ConfigError(
            "is a step log, not a trace", file=printable(name),
            allowed="a JSON trace, as `train --trace FILE.json` writes",
        )  # fmt: skip
    document = read_mapping(name, max_bytes=MAX_BYTES, max_nodes=MAX_NODES)
    fields = Fields(document, file=name)
    events = fields.mappings("traceEvents", low=1)
    spans = tuple(_span(event) for event in events if event.any("ph", default="") == "X")
    if not spans:
        raise ConfigError("has no spans", file=printable(name), key="traceEvents")
    return Trace(spans=spans, plan_hash=_plan_hash(fields))


def _plan_hash(fields: Fields) -> str | None:
    if not isinstance(fields.any("otherData", default=None), Mapping):
        return None
    other = fields.mapping("otherData")
    return other.text("plan_hash") if "plan_hash" in other.names else None


def _span(event: Fields) -> Span:
    start_us = event.number("ts", low=0.0, high=_MAX_US)
    length_us = event.number("dur", low=0.0, high=_MAX_US)
    return Span(
        rank=event.integer("pid", low=1, high=10**9) - 1,
        track=event.text("cat"),
        name=event.text("name"),
        start_s=start_us * 1e-6,
        finish_s=(start_us + length_us) * 1e-6,
    )


# Perfetto's native format

_VARINT, _FIXED64, _BYTES = 0, 1, 2

# Trace and TracePacket
_PACKET = 1
_TIMESTAMP, _SEQUENCE_ID, _TRACK_EVENT, _SEQUENCE_FLAGS, _TRACK_DESCRIPTOR = 8, 10, 11, 13, 60
# TrackDescriptor, ProcessDescriptor, CounterDescriptor
_UUID, _NAME, _PROCESS, _PARENT_UUID, _COUNTER, _CHILD_ORDERING, _SIBLING_RANK = 1, 2, 3, 5, 8, 11, 12
_PID, _PROCESS_NAME = 1, 6
_UNIT = 3
_UNIT_BYTES, _EXPLICIT_ORDER = 3, 3
# TrackEvent
_TYPE, _TRACK_UUID, _EVENT_NAME, _COUNTER_VALUE, _FLOW, _LAST_OF_FLOW = 9, 11, 23, 30, 47, 48
_BEGIN, _END, _VALUE = 1, 2, 4

_SEQUENCE = 1
_STATE_CLEARED = 1


def perfetto_bytes(trace: Trace) -> bytes:
    """`trace` as a Perfetto trace: a process per rank with its tracks, times in nanoseconds.

    Packets are in order of time, after the descriptors of tracks.
    """
    ranks = trace.ranks
    uuid_of_rank = {rank: number for number, rank in enumerate(ranks, start=1)}
    descriptors = [_process(uuid_of_rank[rank], rank, trace.name_of(rank)) for rank in ranks]
    outgoing: dict[int, list[int]] = {}
    incoming: dict[int, list[int]] = {}
    for number, arrow in enumerate(trace.arrows, start=1):
        outgoing.setdefault(arrow.source, []).append(number)
        incoming.setdefault(arrow.target, []).append(number)
    events: list[tuple[int, bytes]] = []
    uuid = len(ranks)
    for track in tracks_of(trace):
        uuid += 1
        descriptors.append(_track(uuid, uuid_of_rank[track.rank], track))
        events += _slices(trace, track, uuid, outgoing, incoming)
    for counter in trace.counters:
        uuid += 1
        descriptors.append(_counter(uuid, uuid_of_rank[counter.rank], counter))
        events += _values(counter, uuid)
    # Stable sort: at one instant a track's end stays before its next start.
    events.sort(key=lambda event: event[0])
    first = _uint(_SEQUENCE_FLAGS, _STATE_CLEARED)
    packets = [_message(_TRACK_DESCRIPTOR, descriptor) for descriptor in descriptors]
    packets += [_uint(_TIMESTAMP, time) + _message(_TRACK_EVENT, event) for time, event in events]
    sequence = _uint(_SEQUENCE_ID, _SEQUENCE)
    return b"".join(
        _message(_PACKET, packet + sequence + (first if number == 0 else b""))
        for number, packet in enumerate(packets)
    )


def _process(uuid: int, rank: int, name: str) -> bytes:
    process = _uint(_PID, rank + 1) + _text(_PROCESS_NAME, name)
    return _uint(_UUID, uuid) + _message(_PROCESS, process) + _uint(_CHILD_ORDERING, _EXPLICIT_ORDER)


def _track(uuid: int, parent: int, track: Track) -> bytes:
    return (
        _uint(_UUID, uuid)
        + _uint(_PARENT_UUID, parent)
        + _text(_NAME, track.name)
        + _uint(_SIBLING_RANK, uuid)
    )


def _counter(uuid: int, parent: int, counter: Counter) -> bytes:
    described = _uint(_UUID, uuid) + _uint(_PARENT_UUID, parent) + _text(_NAME, counter.name)
    return described + _message(_COUNTER, _uint(_UNIT, _UNIT_BYTES)) + _uint(_SIBLING_RANK, uuid)


def _slices(
    trace: Trace, track: Track, uuid: int, outgoing: dict[int, list[int]], incoming: dict[int, list[int]]
) -> Iterable[tuple[int, bytes]]:
    """The start and end of every span of a track, with the arrows that leave and reach it."""
    on_track = _uint(_TRACK_UUID, uuid)
    for place in track.spans:
        span = trace.spans[place]
        begin = _uint(_TYPE, _BEGIN) + on_track + _text(_EVENT_NAME, span.name)
        begin += b"".join(_fixed(_FLOW, number) for number in outgoing.get(place, ()))
        begin += b"".join(_fixed(_LAST_OF_FLOW, number) for number in incoming.get(place, ()))
        yield _ns(span.start_s), begin
        yield _ns(span.finish_s), _uint(_TYPE, _END) + on_track


def _values(counter: Counter, uuid: int) -> Iterable[tuple[int, bytes]]:
    on_track = _uint(_TYPE, _VALUE) + _uint(_TRACK_UUID, uuid)
    for time_s, nbytes in zip(counter.times_s, counter.nbytes, strict=True):
        yield _ns(time_s), on_track + _uint(_COUNTER_VALUE, round(nbytes))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _varint(value: int) -> bytes:
    """Seven bits per byte, lowest first; the top bit is set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _uint(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<Q", value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


# Writing


def write_trace(trace: Trace, path: str | PathLike[str]) -> None:
    """Write `trace` to `path` atomically: native Perfetto format for `.pftrace`, otherwise Chrome's JSON.

    ConfigError where the file cannot be written.
    """
    name = fspath(path)
    write_file(name, perfetto_bytes(trace) if name.endswith(".pftrace") else chrome_bytes(trace))


def chrome_bytes(trace: Trace) -> bytes:
    """`trace` in the Trace Event Format (JSON object form): a process per rank, a thread per track, times in
    us.

    Processes and threads count from 1, as viewers take 0 for the idle task.
    """
    events: list[dict[str, Any]] = []
    for rank in trace.ranks:
        events.append(_named("process_name", rank, 0, trace.name_of(rank)))
        events.append(
            {"ph": "M", "pid": rank + 1, "name": "process_sort_index", "args": {"sort_index": rank}}
        )
    thread_of: dict[int, int] = {}
    threads: dict[int, int] = {}
    for track in tracks_of(trace):
        thread = threads[track.rank] = threads.get(track.rank, 0) + 1
        events.append(_named("thread_name", track.rank, thread, track.name))
        sort = {"sort_index": thread}
        events.append(
            {"ph": "M", "pid": track.rank + 1, "tid": thread, "name": "thread_sort_index", "args": sort}
        )
        for place in track.spans:
            thread_of[place] = thread
            events.append(_complete(trace, place, thread))
    for number, arrow in enumerate(trace.arrows, start=1):
        events.append({**_inside(trace, arrow.source, thread_of), "ph": "s", "id": number})
        events.append({**_inside(trace, arrow.target, thread_of), "ph": "f", "bp": "e", "id": number})
    for counter in trace.counters:
        for time_s, nbytes in zip(counter.times_s, counter.nbytes, strict=True):
            value = {"bytes": round(nbytes)}
            at = _us(time_s)
            events.append({"ph": "C", "pid": counter.rank + 1, "name": counter.name, "ts": at, "args": value})
    document: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if trace.plan_hash is not None:  # viewers show it unchanged
        document["otherData"] = {"plan_hash": trace.plan_hash}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    event = {"ph": "M", "pid": rank + 1, "name": what, "args": {"name": name}}
    return {**event, "tid": thread} if thread else event


def _complete(trace: Trace, place: int, thread: int) -> dict[str, Any]:
    span = trace.spans[place]
    start, finish = _us(span.start_s), _us(span.finish_s)
    return {
        "ph": "X",
        "pid": span.rank + 1,
        "tid": thread,
        "name": span.name,
        "cat": span.track,
        "ts": start,
        "dur": round(finish - start, 3),
    }


def _inside(trace: Trace, place: int, thread_of: dict[int, int]) -> dict[str, Any]:
    """One end of an arrow, bound to the span whose middle it gives."""
    span = trace.spans[place]
    middle = _us((span.start_s + span.finish_s) / 2)
    return {"pid": span.rank + 1, "tid": thread_of[place], "name": "send", "cat": "send", "ts": middle}


def _us(seconds: float) -> float:
    """Microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
