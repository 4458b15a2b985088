"""Output of `frontier`: JSON, tables and the plot.

`frontier_document` is `--json` (docs/reference/formats.md). `pick_lines`, `curve_table`, `profile_table` and
`reference_lines` are parts of the card; `plot_of` is the plot of `--plot`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TypeVar

from shardwise.app.cli import words
from shardwise.app.cli.card import NOT_AS_GIVEN, all_devices_line, idle_line
from shardwise.app.cli.frontier.subject import StrategySubject, Subject
from shardwise.app.cli.output import USUAL, Line, TableRow, columns, row
from shardwise.app.cli.whole_run import run_document
from shardwise.app.plot import Dot, Mark, Plot, PlotLine
from shardwise.cluster import Cluster, pools_of
from shardwise.questions import FrontierAnswer, RunOnPart, point_document
from shardwise.search import Curve, Point, Reference, chosen, smallest

LayoutT = TypeVar("LayoutT")

VERSION = 1

LEAST_NOTE = 30
"""Fewest columns in which a layout is shortened."""


def frontier_document(
    subject: Subject[LayoutT], found: FrontierAnswer[LayoutT], runs: Sequence[RunOnPart] | None = None
) -> dict[str, object]:
    """The whole answer; with the whole `runs` on each part where a length is requested."""
    return {
        "schema": "shardwise.frontier",
        "version": VERSION,
        **subject.question(),
        "mode": found.mode,
        "objectives": list(found.objectives),
        "memory_limit_bytes": found.limit_bytes if isfinite(found.limit_bytes) else None,
        "points": [point_document(subject.source, point) for point in found.points],
        "chosen": None if found.pick is None else point_document(subject.source, found.pick),
        "references": [
            {
                "name": reference.name,
                "fits": reference.fits,
                **point_document(subject.source, reference.point),
            }
            for reference in found.references
        ],
        "profile": [_profile(curve, found) for curve in found.curves],
        **({} if runs is None else {"whole_run": [run_document(run) for run in runs]}),
        "search_s": sum(curve.search_s for curve in found.curves),
        "search_cpu_s": sum(curve.search_cpu_s for curve in found.curves),
        "epsilon": found.epsilon,
        "uneven": "not searched" if is_of_uniform_strategies(subject) else None,
        **subject.sizes(),
        "certificate": subject.certificate(found.curves),
    }


def is_of_uniform_strategies(subject: Subject[LayoutT]) -> bool:
    """Whether uneven plans, which `plan` searches on a mixed cluster, are left out."""
    return isinstance(subject, StrategySubject) and not subject.source.curves.cluster.is_uniform


def _profile(curve: Curve[LayoutT], found: FrontierAnswer[LayoutT]) -> Mapping[str, object]:
    """An entry of `profile`: figures of the fastest, knee and smallest point, null where there is none."""
    fastest = chosen(curve.points, mode="time", limit_bytes=found.limit_bytes)
    return {
        "devices": curve.devices,
        "part": curve.part.name,
        "points": len(curve.points),
        "kept": found.retained(curve),
        "epsilon": curve.epsilon,
        "fastest": _figures(fastest),
        "knee": _figures(curve.knee),
        "smallest": _figures(smallest(curve.points) if curve.points else None),
        "device_memory_bytes": curve.device_bytes,
        "highlights": [{"name": name, **_point_figures(point)} for name, point in curve.highlights().items()],
    }


def _figures(point: Point[LayoutT] | None) -> Mapping[str, object] | None:
    return None if point is None else _point_figures(point)


def _point_figures(point: Point[LayoutT]) -> Mapping[str, object]:
    return {
        "time_s": point.time_s,
        "memory_bytes": point.memory_bytes,
        "device_s": point.device_s,
        "cost_usd": point.cost_usd,
    }


# Tables


def dollars(cost_usd: float | None) -> str:
    """Dollars per step with three digits; a dash where prices are not known."""
    return "-" if cost_usd is None else f"${words.digits(cost_usd, 3)}"


def figures(point: Point[LayoutT]) -> tuple[str, ...]:
    """Time, memory, devices, device-seconds and cost of a point, as texts."""
    return (
        f"{words.seconds(point.time_s)} per step",
        f"{words.memory(point.memory_bytes)} per device",
        words.counted(point.devices, "device"),
        f"{words.digits(point.device_s, 4)} device-seconds",
        *(() if point.cost_usd is None else (f"{dollars(point.cost_usd)} per step",)),
    )


def part_text(found: FrontierAnswer[LayoutT], part: Cluster) -> str:
    """The number of devices of a part, with the names of its pools where the searched parts have several."""
    counted = words.counted(part.devices, "device")
    return f"{counted}, {' + '.join(_pools(part))}" if _has_pools(found) else counted


def _has_pools(found: FrontierAnswer[LayoutT]) -> bool:
    """Whether the searched parts have several pools."""
    return len({pool for curve in found.curves for pool in _pools(curve.part)}) > 1


def _pools(part: Cluster) -> list[str]:
    return [pool.name for pool in pools_of(part)]


def frontier_idle_lines(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Iterator[Line]:
    """The idle devices of the pick on a cluster of several pools, and the least step time of all devices."""
    pick, cluster = found.pick, subject.source.curves.cluster
    if pick is None or pick.devices == cluster.devices or len(_pools(cluster)) == 1:
        return
    every = [point for curve in found.curves if curve.part == cluster for point in curve.points]
    best = chosen(every, mode="time", limit_bytes=found.limit_bytes)
    yield idle_line(subject.source.curves.idle_of(pick.part), cluster.devices)
    if best is not None and found.mode == "time":
        yield all_devices_line(best.time_s, pick.time_s)


def pick_lines(subject: Subject[LayoutT], pick: Point[LayoutT], why: str) -> Iterator[Line]:
    """The point that the mode chooses, and why."""
    yield row("chosen", (subject.title(pick), "value"), (f"   {why}", "dim"))
    yield from words.wrapped_rows("", subject.details(pick))
    yield from words.wrapped_rows("", figures(pick), "value")


def curve_table(
    subject: Subject[LayoutT], found: FrontierAnswer[LayoutT], curve: Curve[LayoutT]
) -> Iterator[Line]:
    """The points of one part that really differ (`Curve.highlights`) and the pick, in shares of the device's
    memory."""
    points, pick = curve.points, found.pick
    names = {points.index(point): name for name, point in curve.highlights().items()}
    if pick is not None and pick in points:
        names.setdefault(points.index(pick), "chosen")
    most_bytes = max(point.memory_bytes for point in points)
    head = f"on {part_text(found, curve.part)}"
    wide = 31 if columns() >= USUAL else 11
    yield ()
    yield TableRow(
        [
            (f" {words.shortened(head, wide):<31}{'step time':>11}{'slower':>10}{'memory':>10}", "label"),
            (f"{'share':>7}{'per step':>10}", "label"),
        ]
    )
    for place, name in sorted(names.items()):
        point = points[place]
        slower = f"{(point.time_s / points[0].time_s - 1.0) * 100:+.1f} %" if place else ""
        share = words.percent(point.memory_bytes / curve.device_bytes, 0)
        title = subject.title(point)
        differs = subject.difference(point, points[0]) if place else ""
        if columns() < USUAL:
            title, differs = "", " · ".join(filter(None, (title, differs)))
        fixed = (
            f"{words.shortened(title, 19):<19}{words.seconds(point.time_s):>11}{slower:>10}"
            f"{words.memory(point.memory_bytes, most_bytes):>10}{share:>7}{dollars(point.cost_usd):>10}"
        )
        is_pick = point == pick
        yield TableRow(
            [(f" {'→' if is_pick else ' '} {name:<9} ", "value"), (fixed, "value" if is_pick else "")]
        )
        if differs:
            yield ((f"     {words.shortened(differs, columns() - 5)}", "dim"),)
    yield from _rule(curve, len(names))


def _rule(curve: Curve[LayoutT], shown: int) -> Iterator[Line]:
    """What the names of points mean."""
    text = (
        f"{shown} of {len(curve.points):,} points; share: of {words.memory(curve.device_bytes)} of a device"
    )
    if any(name.startswith("in ") for name in curve.highlights()):
        text += "; in 1/2: the fastest there"
    if curve.knee is None:
        rule = "no knee: no slower point frees 5 % of a device for each percent of time"
    else:
        rule = "knee: up to it each percent of time frees 5 % of a device, beyond it less"
    for line in (text, rule):
        yield ((f"   {line}", "dim"),)


def reference_lines(subject: Subject[LayoutT], references: Sequence[Reference[LayoutT]]) -> Iterator[Line]:
    """Common strategies or layouts on as many devices, for comparison."""
    for place, reference in enumerate(references):
        point = reference.point
        fixed = (
            f"  {reference.name:<14}{words.seconds(point.time_s):>11}{words.memory(point.memory_bytes):>11}"
            f"{dollars(point.cost_usd):>10}  "
        )
        if place == 0:
            yield ()
            where = words.counted(point.devices, "device")
            if not isinstance(subject, StrategySubject):
                where += ", the whole batch at once"
            yield ((f" for comparison, on {where}", "label"),)
        note = subject.title(point) if reference.fits else f"does not fit · {subject.title(point)}"
        yield from _with_note(fixed, note)


def _with_note(fixed: str, note: str) -> Iterator[Line]:
    """A row of figures, and its layout in the rest of the line where there is room, else in lines of its
    own."""
    left = columns() - len(fixed)
    if left >= min(len(note), LEAST_NOTE):
        yield TableRow([(fixed, ""), (words.shortened(note, left), "dim")])
        return
    yield TableRow([(fixed, "")])
    for line in words.wrapped(note.split(" · "), " · ", columns() - 5):
        yield ((f"     {line}", "dim"),)


def profile_table(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Iterator[Line]:
    """Per part its fastest point within the limit, its knee and its smallest point: time, memory,
    device-seconds and cost; and the number of its points on the frontier of all parts."""
    yield ()
    head = f" {'devices':>7}  {'point':<9}{'step time':>11}{'memory':>10}{'device-s':>9}{'per step':>10}"
    yield TableRow([(head, "label"), ("  layout" if columns() >= len(head) + LEAST_NOTE else "", "label")])
    several = _has_pools(found)
    for curve in found.curves:
        if not curve.points:
            pools = f"  {' + '.join(_pools(curve.part))}" if several else ""
            yield ((f" {curve.devices:>7,}  nothing fits{pools}", "dim"),)
        elif several:
            retained = f"{found.retained(curve)} of {len(curve.points)} points"
            yield ((f" {curve.devices:>7,}  {' + '.join(_pools(curve.part))}, {retained}", "dim"),)
        rows = _profile_rows(curve, found.limit_bytes)
        for index, (name, point) in enumerate(rows):
            number = f"{curve.devices:,}" if index == 0 and not several else ""
            fixed = (
                f" {number:>7}  {name:<9}{words.seconds(point.time_s):>11}"
                f"{words.memory(point.memory_bytes):>10}{words.digits(point.device_s, 4):>9}"
                f"{dollars(point.cost_usd):>10}  "
            )
            notes = ["above the limit"] if point.memory_bytes > found.limit_bytes else []
            if index == 0 and "cost" in found.objectives and not several:
                notes.append(f"{found.retained(curve)} of {len(curve.points)} points")
            text = " · ".join((*notes, subject.title(point), *subject.details(point)))
            yield from _with_note(fixed, text)


def _profile_rows(curve: Curve[LayoutT], limit_bytes: float) -> Iterator[tuple[str, Point[LayoutT]]]:
    """The distinct fastest, knee and smallest points of a curve."""
    if not curve.points:
        return
    fastest, knee_point = chosen(curve.points, mode="time", limit_bytes=limit_bytes), curve.knee
    if fastest is not None:
        yield "fastest", fastest
    if knee_point is not None and knee_point.memory_bytes <= limit_bytes and knee_point != fastest:
        yield "knee", knee_point
    if smallest(curve.points) != fastest:
        yield "smallest", smallest(curve.points)


def plot_of(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Plot:
    """The plot: a line per part with points, the limit, and as marks the pick, the extreme points of its
    curve (or of the last curve with points) and the references."""

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
        subtitle=" · ".join((f"Pareto frontier of step time and memory: {count:,} points", *facts)),
        lines=tuple(lines),
        marks=tuple(Mark(name=name, dot=dot(point)) for name, point in _marked(found)),
        limit_bytes=found.limit_bytes if isfinite(found.limit_bytes) else None,
    )


def _marked(found: FrontierAnswer[LayoutT]) -> Iterator[tuple[str, Point[LayoutT]]]:
    """The marked points with their names."""
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
