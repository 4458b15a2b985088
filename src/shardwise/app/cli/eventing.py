"""The commands `events generate` and `events convert`: write a trace of events to a file or to stdout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.request import choice, count, duration
from shardwise.app.cli.words import counted, wrapped_rows
from shardwise.cluster import (
    EVENT_KINDS,
    MAX_TRACE_BYTES,
    EventTrace,
    convert_events,
    events_text,
    generate_events,
    load_cluster,
)
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import check_output_path, write_file
from shardwise.units import format_seconds

KIND_NAMES = {
    "LinkChange": "link",
    "Slowdown": "slow",
    "NodeLost": "lost",
    "DeviceLost": "lost",
    "NodeJoined": "joined",
    "Notice": "notice",
}


def generated(
    kind: str, *, cluster: str, inter_node: str | None, length: str, seed: str, out: str | None, is_json: bool
) -> Output:
    """The answer of `events generate`; the trace goes to `out`, or to stdout where that is None."""
    kind = choice("KIND", kind, tuple(EVENT_KINDS))
    length_s = duration("--length", length, low="1s", high="365d")
    number = count("--seed", seed, low=0, high=999_999_999)
    if out is not None:
        check_output_path("--out", out, inputs=(cluster,))
    trace = generate_events(
        load_cluster(cluster, inter_node=inter_node), kind, length_s=length_s, seed=number
    )
    return _written(trace, out, is_json=is_json, dropped_notes=())


def converted(path: str, *, per_node: str, out: str | None, is_json: bool) -> Output:
    """The answer of `events convert`."""
    devices = count("--per-node", per_node, low=1, high=1024)
    if out is not None:
        check_output_path("--out", out, inputs=(path,))
    trace, dropped_notes = convert_events(path, per_node=devices)
    return _written(trace, out, is_json=is_json, dropped_notes=dropped_notes)


def _written(trace: EventTrace, out: str | None, *, is_json: bool, dropped_notes: Sequence[str]) -> Output:
    notes = [f"shardwise: {text}" for text in dropped_notes]
    text = events_text(trace)
    if out is not None:
        if len(text) > MAX_TRACE_BYTES:
            raise ConfigError(
                "would be too large to be read as a trace", file=printable(out),
                found=f"{len(text)} bytes for {len(trace.events)} events",
                allowed=f"at most {MAX_TRACE_BYTES} bytes: a shorter --length",
            )  # fmt: skip
        write_file(out, text.encode())
        notes.append(f"wrote {out}")
    kinds = Counter(KIND_NAMES[type(event).__name__] for event in trace.events)
    if is_json:
        document = {
            "schema": "shardwise.events-answer", "version": 1, "nodes": trace.nodes,
            "absent": len(trace.absent), "events": len(trace.events), "kinds": dict(sorted(kinds.items())),
            "end_s": trace.end_s, "source": trace.source,
            "dropped": list(dropped_notes), "told": list(dropped_notes),
        }  # fmt: skip
        return Output(document=document, notes=notes)
    if out is None:
        return Output(lines=[((line, ""),) for line in text.splitlines()], is_verbatim=True, notes=notes)
    return Output(lines=list(_card(trace, kinds)), notes=notes)


def _card(trace: EventTrace, kinds: Counter[str]) -> list[Line]:
    parts = [f"{number:,} {name}" for name, number in kinds.most_common()]
    present_counts = [len(nodes) for _, nodes in trace.present()]
    lines = [row("events", (f"{len(trace.events):,}", "value"), (f" in {format_seconds(trace.end_s)}", ""))]
    lines += wrapped_rows("", parts)
    lines.append(
        row(
            "nodes",
            (f"{trace.nodes:,}", "value"),
            (f"   {min(present_counts):,} to {max(present_counts):,} available", "dim"),
        )
    )
    if trace.sites:
        lines.append(row("sites", (counted(len(trace.sites), "site"), "")))
    return lines
