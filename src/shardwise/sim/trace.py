"""A trace as a file that opens in Perfetto: Chrome's JSON, or TrackEvent packets where the name ends in
.pftrace.
"""

from __future__ import annotations

import json
from os import PathLike, fspath
from typing import Any

from shardwise.plan import write_file
from shardwise.sim.perfetto import perfetto_bytes
from shardwise.sim.spans import Trace, tracks_of


def write_trace(trace: Trace, path: str | PathLike[str]) -> None:
    """Write `trace` to `path`, atomically: native Perfetto where it ends in `.pftrace`, else Chrome's JSON.

    Raises ConfigError where the file cannot be written.
    """
    name = fspath(path)
    write_file(name, perfetto_bytes(trace) if name.endswith(".pftrace") else chrome_bytes(trace))


def chrome_bytes(trace: Trace) -> bytes:
    """`trace` in the Trace Event Format (JSON object form): a process per rank, a thread per track, times in
    us.

    Processes and threads count from 1, as readers take 0 for the idle task.
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
    if trace.plan_hash is not None:  # what viewers show as they find it
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
    """One end of an arrow: bound to the span whose middle it names."""
    span = trace.spans[place]
    middle = _us((span.start_s + span.finish_s) / 2)
    return {"pid": span.rank + 1, "tid": thread_of[place], "name": "send", "cat": "send", "ts": middle}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
