"""`frontier --plot FILE`: the answer as a plot."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TypeVar

from shardwise.app.cli.frontier.document import FrontierAnswer
from shardwise.app.cli.frontier.subject import Subject
from shardwise.app.cli.frontier.tables import figures, part_text
from shardwise.app.cli.proof import NOT_AS_GIVEN
from shardwise.app.plot import Dot, Mark, Plot, PlotLine
from shardwise.search import Point, smallest

LayoutT = TypeVar("LayoutT")


def plot_of(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Plot:
    """A line for each part with points; the limit; and as marks the pick, and on its devices (or the
    last with points) both ends and what is customary."""

    def dot(point: Point[LayoutT]) -> Dot:
        lines = (subject.title(point), *subject.details(point), *figures(point))
        return Dot(
            time_s=point.time_s,
            memory_bytes=point.memory_bytes,
            lines=lines,
            more=tuple(subject.layout_lines(point)),
        )

    lines = []
    for curve in found.curves:
        if not curve.points:
            continue
        knee_point = curve.knee
        lines.append(
            PlotLine(
                name=part_text(found, curve.part),
                dots=tuple(map(dot, curve.points)),
                knee=None if knee_point is None else curve.points.index(knee_point),
            )
        )
    title, facts = subject.caption()
    facts = (*facts, NOT_AS_GIVEN) if subject.priced_as else facts
    count = sum(len(line.dots) for line in lines)
    return Plot(
        title=title,
        subtitle=" · ".join((f"time against memory: {count:,} points no other beats in both", *facts)),
        lines=tuple(lines),
        marks=tuple(Mark(name=name, dot=dot(point)) for name, point in _marked(found)),
        limit_bytes=found.limit_bytes if isfinite(found.limit_bytes) else None,
    )


def _marked(found: FrontierAnswer[LayoutT]) -> Iterator[tuple[str, Point[LayoutT]]]:
    """Points with names."""
    if found.pick is not None:
        yield "chosen", found.pick
    if found.pick is not None:
        curve = found.curve_of(found.pick)
    else:
        curve = next(curve for curve in reversed(found.curves) if curve.points)
    yield "time optimum", curve.points[0]
    if len(curve.points) > 1:
        yield "memory optimum", smallest(curve.points)
    for reference in found.references:
        yield reference.name if reference.fits else f"{reference.name} (does not fit)", reference.point
