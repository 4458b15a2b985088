"""`frontier --plot FILE`: the answer as a plot."""

from __future__ import annotations

from math import isfinite
from typing import TypeVar

from shardwise.app.cli import words
from shardwise.app.cli.frontier.document import Found
from shardwise.app.cli.frontier.subject import Subject
from shardwise.app.cli.frontier.tables import figures
from shardwise.app.plot import Dot, Line, Mark, Plot
from shardwise.search import Point

LayoutT = TypeVar("LayoutT")


def plot_of(subject: Subject[LayoutT], found: Found[LayoutT]) -> Plot:
    """A line for each device count with points, the pick as a mark, the limit."""

    def dot(point: Point[LayoutT]) -> Dot:
        lines = (subject.title(point), *subject.details(point), *figures(point))
        return Dot(time_s=point.time_s, memory_bytes=point.memory_bytes, lines=lines)

    lines = []
    for curve in found.curves:
        if not curve.points:
            continue
        bend = curve.knee
        lines.append(
            Line(
                name=words.counted(curve.devices, "device"),
                dots=tuple(map(dot, curve.points)),
                knee=None if bend is None else curve.points.index(bend),
            )
        )
    title, facts = subject.caption()
    count = sum(len(line.dots) for line in lines)
    return Plot(
        title=title,
        subtitle=" · ".join((f"time against memory: {count:,} points no other beats in both", *facts)),
        lines=tuple(lines),
        marks=() if found.pick is None else (Mark(name="chosen", dot=dot(found.pick)),),
        limit_bytes=found.limit_bytes if isfinite(found.limit_bytes) else None,
    )
