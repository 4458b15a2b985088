"""Perfetto's native format: a protobuf `Trace` of TrackEvent packets, written field by field.

Field numbers are those of perfetto/trace (perfetto.dev/docs/reference/trace-packet-proto). A protobuf message
is a run of fields, each a key (field number and wire type) and a value: a varint, eight bytes, or a length
and bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from shardwise.sim.spans import Counter, Trace, Track, tracks_of

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
    """`trace` as a Perfetto trace: a process per rank, its tracks below it, times in nanoseconds.

    Packets are in order of time, the descriptors of tracks first.
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
    # Stable: at one instant a track's end stays before its next beginning.
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
    """The beginning and end of every span of a track, with the arrows that leave and reach it."""
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
    """Seven bits per byte, lowest first, the top bit set on all but the last."""
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
