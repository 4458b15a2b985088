"""Trace files as a reader sees them: names, tracks, times, arrows, counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from shardwise.errors import ConfigError, InternalError
from shardwise.schedule import generate
from shardwise.sim import (
    Arrow,
    Durations,
    Span,
    Trace,
    activation_bytes,
    simulate,
    task_graph,
    trace_of,
    write_trace,
)
from shardwise.sim.traces import Counter, _varint, tracks_of

SCHEDULE = generate("1f1b", pp=2, microbatches=2, vpp=1)
DURATIONS = Durations.of(
    stages=2, forward_s=1, backward_s=2, hop_forward_s=0.25, hop_backward_s=0.5, gather_s=1, reduce_s=3
)


def step_trace() -> Trace:
    timeline = simulate(task_graph(SCHEDULE, DURATIONS))
    return trace_of(timeline, activations=activation_bytes(SCHEDULE, timeline, [5e9, 5e9]))


def chrome(path: Path) -> list[dict[str, Any]]:
    write_trace(step_trace(), path)
    events = json.loads(path.read_bytes())["traceEvents"]
    assert isinstance(events, list)
    return events


def packets(path: Path, trace: Trace) -> list[Any]:
    write_trace(trace, path)
    parsed = protos.Trace()
    assert parsed.ParseFromString(path.read_bytes()) == path.stat().st_size
    return list(parsed.packet)


def test_chrome_has_a_process_per_rank_and_a_thread_per_track(tmp_path: Path) -> None:
    events = chrome(tmp_path / "step.json")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "rank 0", 2: "rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = ["compute", "communication", "data parallel"]
    assert threads == {(pid, tid): name for pid in (1, 2) for tid, name in enumerate(tracks, start=1)}


def test_chrome_spans_have_the_times_of_the_step(tmp_path: Path) -> None:
    # Gathers 0-1. Rank 0: 0F0 1-2, 0F1 2-3; 1F0 from 2.25 to 3.25, 1B0 to 5.25, sent back by 5.75: 0B0
    # 5.75-7.75.
    events = {e["name"]: e for e in chrome(tmp_path / "step.json") if e["ph"] == "X"}
    assert (events["0F0"]["ts"], events["0F0"]["dur"]) == (1e6, 1e6)
    assert (events["1F0"]["ts"], events["1F0"]["dur"], events["1F0"]["pid"]) == (2.25e6, 1e6, 2)
    assert (events["0B0"]["ts"], events["0B0"]["dur"]) == (5.75e6, 2e6)
    assert (events["0 to 1 F0"]["ts"], events["0 to 1 F0"]["dur"], events["0 to 1 F0"]["tid"]) == (
        2e6,
        2.5e5,
        2,
    )
    assert events["gather 1"]["cat"] == "data parallel"
    assert len(events) == 8 + 4 + 2 + 2  # actions, sends, gathers, reductions


def test_chrome_arrows_are_within_the_spans_that_they_join(tmp_path: Path) -> None:
    events = chrome(tmp_path / "step.json")
    spans = [e for e in events if e["ph"] == "X"]

    def span_at(end: dict[str, Any]) -> str:
        inside = [
            s["name"]
            for s in spans
            if (s["pid"], s["tid"]) == (end["pid"], end["tid"]) and s["ts"] < end["ts"] < s["ts"] + s["dur"]
        ]
        assert len(inside) == 1
        return str(inside[0])

    starts = {e["id"]: span_at(e) for e in events if e["ph"] == "s"}
    ends = {e["id"]: span_at(e) for e in events if e["ph"] == "f"}
    pairs = {(starts[number], ends[number]) for number in starts}
    assert pairs == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}
    assert all(e["bp"] == "e" for e in events if e["ph"] == "f")


def test_chrome_counts_the_activations_in_flight(tmp_path: Path) -> None:
    values = [e for e in chrome(tmp_path / "step.json") if e["ph"] == "C" and e["pid"] == 1]
    assert [(e["ts"], e["args"]["bytes"]) for e in values][:2] == [
        (1e6, 5_000_000_000),
        (2e6, 10_000_000_000),
    ]
    assert values[-1]["args"]["bytes"] == 0


def test_pftrace_is_read_by_perfettos_own_messages(tmp_path: Path) -> None:
    found = packets(tmp_path / "step.pftrace", step_trace())
    descriptors = [p.track_descriptor for p in found if p.HasField("track_descriptor")]
    names = {d.uuid: d.process.process_name if d.HasField("process") else d.name for d in descriptors}
    parents = {d.uuid: d.parent_uuid for d in descriptors if d.parent_uuid}
    assert [d.process.pid for d in descriptors if d.HasField("process")] == [1, 2]
    units = {d.counter.unit for d in descriptors if d.HasField("counter")}
    assert units == {protos.CounterDescriptor.UNIT_SIZE_BYTES}
    below = sorted((names[parent], names[uuid]) for uuid, parent in parents.items())
    tracks = ["activations in flight", "communication", "compute", "data parallel"]
    assert below == [(rank, name) for rank in ("rank 0", "rank 1") for name in tracks]

    open_spans: dict[int, tuple[str, int]] = {}
    spans = {}
    outgoing, incoming = {}, {}
    counted: list[tuple[int, int]] = []
    for packet in found:
        event = packet.track_event
        if event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_spans
            open_spans[event.track_uuid] = (event.name, packet.timestamp)
            outgoing.update(dict.fromkeys(event.flow_ids, event.name))
            incoming.update(dict.fromkeys(event.terminating_flow_ids, event.name))
        elif event.type == protos.TrackEvent.TYPE_SLICE_END:
            name, start = open_spans.pop(event.track_uuid)
            spans[name] = (names[event.track_uuid], start, packet.timestamp)
        elif event.type == protos.TrackEvent.TYPE_COUNTER:
            counted.append((packet.timestamp, event.counter_value))
    assert open_spans == {}
    assert spans["1F0"] == ("compute", 2_250_000_000, 3_250_000_000)
    assert spans["0B0"] == ("compute", 5_750_000_000, 7_750_000_000)
    assert spans["reduce 1"][0] == "data parallel"
    pairs = {(outgoing[number], incoming[number]) for number in outgoing}
    assert pairs == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}
    assert (2_000_000_000, 10_000_000_000) in counted
    assert found[0].sequence_flags == 1
    assert {p.trusted_packet_sequence_id for p in found} == {1}
    times = [p.timestamp for p in found if p.HasField("track_event")]
    assert times == sorted(times)


def test_overlapping_spans_go_side_by_side() -> None:
    # a 0-2 and b 1-3 overlap; c 2-4 fits after a, d 2.5-5 overlaps both.
    names = {"a": (0.0, 2.0), "b": (1.0, 3.0), "c": (2.0, 4.0), "d": (2.5, 5.0)}
    trace = Trace(spans=tuple(Span(0, "communication", name, *times) for name, times in names.items()))
    tracks = [(track.name, [trace.spans[place].name for place in track.spans]) for track in tracks_of(trace)]
    assert tracks == [("communication", ["a", "c"]), ("communication 2", ["b"]), ("communication 3", ["d"])]


def test_measured_spans_of_no_length_and_odd_names(tmp_path: Path) -> None:
    spans = (Span(0, "host", 'näme "x"\n', 0.0, 0.0), Span(0, "host", "next", 0.0, 1e-9))
    trace = Trace(spans=spans, arrows=(Arrow(0, 1),), counters=(Counter(0, "c", [0.0], [2.0**40]),))
    found = [p.track_event for p in packets(tmp_path / "odd.pftrace", trace) if p.HasField("track_event")]
    assert [e.name for e in found if e.type == protos.TrackEvent.TYPE_SLICE_BEGIN] == ['näme "x"\n', "next"]
    assert [e.counter_value for e in found if e.type == protos.TrackEvent.TYPE_COUNTER] == [2**40]
    write_trace(trace, tmp_path / "odd.json")
    names = [
        e["name"] for e in json.loads((tmp_path / "odd.json").read_bytes())["traceEvents"] if e["ph"] == "X"
    ]
    assert names == ['näme "x"\n', "next"]


def test_varints() -> None:
    # 300 = 0b10_0101100: low seven bits with the top bit set, then the rest.
    assert [_varint(value) for value in (0, 127, 128, 300)] == [b"\x00", b"\x7f", b"\x80\x01", b"\xac\x02"]
    assert _varint(2**64 - 1) == b"\xff" * 9 + b"\x01"


def test_broken_traces_are_refused() -> None:
    with pytest.raises(InternalError, match="ends before it starts"):
        Trace(spans=(Span(0, "compute", "a", 1.0, 0.5),))
    with pytest.raises(InternalError, match="ends before it starts"):
        Trace(spans=(Span(0, "compute", "a", float(np.nan), 0.5),))
    with pytest.raises(InternalError, match="without a span"):
        Trace(spans=(), arrows=(Arrow(0, 0),))


def test_a_large_step_stays_small(tmp_path: Path) -> None:
    schedule = generate("1f1b", pp=16, microbatches=64, vpp=1)
    durations = Durations.of(
        stages=16, forward_s=1 / 3, backward_s=2 / 3, hop_forward_s=0.1, hop_backward_s=0.1
    )
    timeline = simulate(task_graph(schedule, durations))
    trace = trace_of(timeline, activations=activation_bytes(schedule, timeline, [1e9 / 3] * 16))
    for name in ("step.json", "step.pftrace"):
        write_trace(trace, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 5_000_000


def test_a_file_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder does not exist"):
        write_trace(step_trace(), tmp_path / "missing" / "step.json")
    with pytest.raises(ConfigError, match="directory"):
        write_trace(step_trace(), tmp_path)
    assert list(tmp_path.iterdir()) == []
