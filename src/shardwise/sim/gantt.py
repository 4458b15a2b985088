"""A timeline as a Gantt chart in text: one row per rank, one column per time slice."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from shardwise.sim.engine import COMPUTE, DATA_PARALLEL, Timeline

_ACTION = re.compile(r"\d+([FBIW])(\d+)")
_IDLE = "·"
_NARROWEST = 10

SHORT = 0.1
"""Part of the median length of an action below which a chart need not show it."""

GANTT_LABELS = 15
"""Columns of a row without its chart and the digits of its rank."""


def gantt(timeline: Timeline, *, width: int = 100, communication: bool = False, narrowest: int = 0) -> str:
    """A Gantt chart of `width` columns over the whole step, with a legend; a column shows the task at its
    middle.

    An action is its letter, its micro-batch where it is wide enough, and its letter again. Each row ends with
    the share of the step in which the rank computes. `communication` adds a row per rank for gathers (g) and
    reductions (r). Where the shortest action would have fewer than `narrowest` columns, the chart shows only
    the beginning and the end of the step, with that many columns for it; actions of less than SHORT of the
    median, such as those of stages without layers, do not count.
    """
    graph = timeline.graph
    makespan = timeline.makespan_s
    ranks = sorted(set(graph.ranks[graph.ranks >= 0].tolist()))
    label = max((len(str(rank)) for rank in ranks), default=1)
    width = max(width, _NARROWEST)
    lines = []
    streams = np.array(graph.streams)
    windows = _windows(timeline, width, narrowest)
    for start, stop in windows:
        if len(windows) > 1:
            lines.append(f"{'beginning' if start == 0.0 else 'end'}: {start:.4g} s to {stop:.4g} s")
        for rank in ranks:
            mine = graph.ranks == rank
            compute = np.flatnonzero(mine & (streams == COMPUTE))
            busy = float((timeline.finish_s - timeline.start_s)[compute].sum())
            used = busy / makespan if makespan else 0.0
            row = _row_text(timeline, compute, width, start, stop)
            lines.append(f"rank {rank:>{label}} |{row}| {used:6.1%}")
            if communication:
                tasks = np.flatnonzero(mine & (streams == DATA_PARALLEL))
                lines.append(f"{'':>{label + 5}} |{_row_text(timeline, tasks, width, start, stop)}|")
    lines.append(_legend(timeline, communication))
    return "\n".join(lines) + "\n"


def _windows(timeline: Timeline, width: int, narrowest: int) -> list[tuple[float, float]]:
    """Start and end of each part of the step that the chart shows, in seconds."""
    graph, makespan = timeline.graph, timeline.makespan_s
    lengths = (timeline.finish_s - timeline.start_s)[[bool(_ACTION.fullmatch(name)) for name in graph.names]]
    lengths = lengths[lengths > SHORT * np.median(lengths)] if len(lengths) else lengths
    shown = width * float(lengths.min()) / narrowest if narrowest and len(lengths) else makespan
    if shown >= 0.5 * makespan:
        return [(0.0, makespan)]
    return [(0.0, shown), (makespan - shown, makespan)]


def _row_text(timeline: Timeline, tasks: NDArray[np.int64], width: int, start: float, stop: float) -> str:
    """`width` characters: the tasks from `start` to `stop`, in order."""
    characters = [_IDLE] * width
    scale = width / (stop - start) if stop > start else 0.0
    for task in tasks.tolist():
        # Column c shows a task that contains its middle, start + (c + 1/2) / scale.
        first = int(np.ceil((timeline.start_s[task] - start) * scale - 0.5))
        last = int(np.ceil((timeline.finish_s[task] - start) * scale - 0.5))
        if last <= 0 or first >= width:
            continue
        text = _task_text(timeline.graph.names[task], last - first)
        characters[max(first, 0) : last] = text[max(-first, 0) :]
    return "".join(characters[:width])


def _task_text(name: str, columns: int) -> str:
    """`columns` characters for one task: letter, number if a letter fits after it, letter."""
    action = _ACTION.fullmatch(name)
    letter, number = (action[1], action[2]) if action else (name[0], "")
    if columns < len(number) + 1:
        number = ""
    return (letter + number).ljust(columns, letter)[:columns]


def _legend(timeline: Timeline, communication: bool) -> str:
    kinds = {match[1] for name in timeline.graph.names if (match := _ACTION.fullmatch(name))}
    meanings = {"F": "forward", "B": "backward", "I": "input grad", "W": "weight grad"}
    parts = [f"{letter} {meaning}" for letter, meaning in meanings.items() if letter in kinds]
    parts += ["g gather", "r reduce"] if communication else []
    number = "digits: microbatch"
    step = f"step {timeline.makespan_s:.6g} s"
    return "  ".join([*parts, f"{_IDLE} idle", number, "%: computing", step])
