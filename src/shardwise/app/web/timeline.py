"""The timeline of a step as packed columns, which a page draws: `timeline_document`.

A column is `{"type": T, "data": B}`: little-endian numbers of type T (`u8`, `u16`, `u32`, `f32`) in base64;
with `values` they are indices in that list. The actions of all rows stand one after the other; row r has
those from `offsets[r]` to `offsets[r + 1]`, in the order of time.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.accuracy import Comparison
from shardwise.plans import Plan, as_ranges
from shardwise.schedule import KINDS
from shardwise.search import PipelineTimeline, computing_s
from shardwise.sim import COMPUTE, DATA_PARALLEL, Span, Timeline

CRITICAL = 8
"""Added to the kind of an action that is on the critical path."""

Ints = NDArray[np.int64]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
"""The name of an action: stage, kind, micro-batch."""

_CODES = {str(kind): code for code, kind in enumerate(KINDS)}

MEASURED = "measured: "
"""The start of the names of measured rows in the trace of a comparison."""


def packed(values: NDArray[np.generic], kind: str | None = None) -> dict[str, str]:
    """A column. Integers take the narrowest type that holds them unless `kind` names one."""
    if kind is None:
        largest = int(np.max(values, initial=0))
        kind = "u8" if largest < 2**8 else "u16" if largest < 2**16 else "u32"
    data = np.ascontiguousarray(values, dtype=f"<{kind[0]}{int(kind[1:]) // 8}")
    return {"type": kind, "data": base64.b64encode(data.tobytes()).decode("ascii")}


def packed_lengths(lengths_s: NDArray[np.float64]) -> dict[str, object]:
    """A column of seconds: of indices where at most 256 values differ, as the durations of a schedule do."""
    values, places = np.unique(lengths_s, return_inverse=True)
    if len(values) > 256:
        return dict(packed(lengths_s, "f32"))
    return {**packed(places.ravel(), "u8"), "values": values.tolist()}


def critical_tasks(timeline: Timeline) -> list[int]:
    """The tasks of a critical path of `timeline`, the last one first: each starts when the one after it in
    the list ends. Where several tasks end then, one of the same rank counts."""
    graph = timeline.graph
    finish_s, ranks = timeline.finish_s.tolist(), graph.ranks.tolist()
    sources = np.repeat(np.arange(len(graph.names)), np.diff(graph.offsets))
    order = np.argsort(graph.dependents, kind="stable")
    before = sources[order].tolist()
    firsts = np.searchsorted(graph.dependents[order], np.arange(len(graph.names) + 1)).tolist()
    if not finish_s:
        return []
    task = int(np.argmax(timeline.finish_s))
    path = [task]
    while firsts[task] < firsts[task + 1]:
        rank = ranks[task]
        task = max(
            before[firsts[task] : firsts[task + 1]],
            key=lambda one: (finish_s[one], ranks[one] == rank),
        )
        path.append(task)
    return path


def timeline_document(plan: Plan, pipelines: Sequence[PipelineTimeline]) -> dict[str, object]:
    """The step of each kind of pipeline, the longest first; `numbers` are the pipelines of a kind."""
    kinds: dict[int, list[int]] = {}
    for number, pipeline in enumerate(pipelines):
        kinds.setdefault(id(pipeline.timeline), []).append(number)
    ordered = sorted(kinds.values(), key=lambda numbers: -pipelines[numbers[0]].timeline.makespan_s)
    return {
        "step_time_s": plan.step_time_s,
        "schedule": plan.best.layout.schedule,
        "pipelines": [_pipeline(plan, pipelines, numbers) for numbers in ordered],
    }


def _pipeline(plan: Plan, pipelines: Sequence[PipelineTimeline], numbers: Sequence[int]) -> dict[str, object]:
    first = pipelines[numbers[0]]
    stages = plan.best.layout.pipelines[numbers[0]].stages
    timeline = first.timeline
    critical = np.zeros(len(timeline.graph.names), dtype=np.int64)
    critical[critical_tasks(timeline)] = CRITICAL
    return {
        "numbers": list(numbers),
        "microbatches": first.schedule.microbatches,
        "makespan_s": timeline.makespan_s,
        "end_s": first.end_s,
        "rows": [
            {
                "name": f"rank {place}",
                "ranks": as_ranges(ranks),
                "device_class": stage.device_class,
                "layers": sum(stage.layers),
                "busy_s": busy_s,
            }
            for place, (ranks, stage, busy_s) in enumerate(
                zip(first.ranks, stages, computing_s(first), strict=True)
            )
        ],
        "stage_rank": list(first.schedule.stage_rank),
        "actions": _actions(first, critical),
        "sends": _sends(first, critical),
        "data_parallel": _data_parallel(timeline, critical),
    }


def _actions(pipeline: PipelineTimeline, critical: Ints) -> dict[str, object]:
    """The actions of each row with their times; a rank runs them in the order of the table."""
    timeline, columns = pipeline.timeline, pipeline.schedule.columns
    graph = timeline.graph
    tasks = np.flatnonzero(np.array([stream == COMPUTE for stream in graph.streams]))
    tasks = tasks[np.argsort(graph.ranks[tasks], kind="stable")]
    return {
        "offsets": columns.offsets.tolist(),
        "kind": packed(columns.kind + critical[tasks], "u8"),
        "stage": packed(columns.stage),
        "microbatch": packed(columns.microbatch),
        "start_s": packed(timeline.start_s[tasks], "f32"),
        "length_s": packed_lengths(graph.duration_s[tasks]),
    }


def _sends(pipeline: PipelineTimeline, critical: Ints) -> dict[str, object]:
    """Sends between ranks: the row that sends, the direction (0 forward, 1 backward), and the times."""
    timeline = pipeline.timeline
    graph = timeline.graph
    is_send = np.array([not stream for stream in graph.streams], dtype=bool) & (graph.ranks >= 0)
    tasks = np.flatnonzero(is_send & (timeline.finish_s > timeline.start_s))
    tasks = tasks[np.lexsort((timeline.start_s[tasks], graph.ranks[tasks]))]
    directions = np.array([" B" in graph.names[task] for task in tasks.tolist()], dtype=np.int64)
    rows = len(pipeline.ranks)
    return {
        "offsets": np.searchsorted(graph.ranks[tasks], np.arange(rows + 1)).tolist(),
        "kind": packed(directions + critical[tasks], "u8"),
        "start_s": packed(timeline.start_s[tasks], "f32"),
        "length_s": packed_lengths(graph.duration_s[tasks]),
    }


def _data_parallel(timeline: Timeline, critical: Ints) -> list[dict[str, object]]:
    """All-gathers and reductions of data parallelism, each with its row and its times."""
    graph = timeline.graph
    return [
        {
            "row": int(graph.ranks[task]),
            "name": graph.names[task],
            "start_s": float(timeline.start_s[task]),
            "length_s": float(timeline.finish_s[task] - timeline.start_s[task]),
            "critical": bool(critical[task]),
        }
        for task, stream in enumerate(graph.streams)
        if stream == DATA_PARALLEL
    ]


def measured_document(plan: Plan, found: Comparison) -> dict[str, object]:
    """The measured step of a comparison as a pipeline of `timeline_document`: a row for each rank, with its
    actions; other spans of a rank are in `data_parallel`."""
    rows = [rank for rank, name in sorted(found.both.names.items()) if name.startswith(MEASURED)]
    place = {rank: row for row, rank in enumerate(rows)}
    actions: list[list[tuple[Span, int, int, int]]] = [[] for _ in rows]
    others: list[Span] = []
    for span in found.both.spans:
        if span.rank not in place:
            continue
        action = _ACTION.fullmatch(span.name) if span.track == COMPUTE else None
        if action is None:
            others.append(span)
        else:
            one = (span, int(action[1]), _CODES[action[2]], int(action[3]))
            actions[place[span.rank]].append(one)
    for own in actions:
        own.sort(key=lambda one: one[0].start_s)
    flat = [one for own in actions for one in own]
    return {
        "numbers": [0],
        "microbatches": plan.best.microbatches[0],
        "makespan_s": found.measured_s,
        "end_s": 0.0,
        "rows": [
            {
                "name": found.both.names[rank].removeprefix(MEASURED),
                "ranks": "",
                "device_class": "",
                "layers": 0,
                "busy_s": sum(one[0].finish_s - one[0].start_s for one in own),
            }
            for rank, own in zip(rows, actions, strict=True)
        ],
        "stage_rank": list(plan.schedules[0].stage_rank),
        "actions": {
            "offsets": np.cumsum([0, *map(len, actions)]).tolist(),
            "kind": packed(np.array([one[2] for one in flat], dtype=np.int64), "u8"),
            "stage": packed(np.array([one[1] for one in flat], dtype=np.int64)),
            "microbatch": packed(np.array([one[3] for one in flat], dtype=np.int64)),
            "start_s": packed(np.array([one[0].start_s for one in flat]), "f32"),
            "length_s": packed_lengths(np.array([one[0].finish_s - one[0].start_s for one in flat])),
        },
        "sends": _no_sends(len(rows)),
        "data_parallel": [
            {
                "row": place[span.rank],
                "name": span.name,
                "start_s": span.start_s,
                "length_s": span.finish_s - span.start_s,
                "critical": False,
            }
            for span in others
        ],
    }


def _no_sends(rows: int) -> dict[str, object]:
    none = np.zeros(0)
    return {
        "offsets": [0] * (rows + 1),
        "kind": packed(none, "u8"),
        "start_s": packed(none, "f32"),
        "length_s": packed_lengths(none),
    }
