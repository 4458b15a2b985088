"""`frontier --json` (docs/reference/formats.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Generic, TypeVar

from shardwise.app.cli.frontier.subject import Subject
from shardwise.search import Curve, Point, Reference, chosen, smallest

LayoutT = TypeVar("LayoutT")

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierAnswer(Generic[LayoutT]):
    """What was asked of a frontier, and its answer; `limit_bytes` is infinite where none was given.
    `references` are what is customary on the devices of the pick, or of the last curve with points."""

    mode: str
    objectives: tuple[str, ...]
    limit_bytes: float
    epsilon: float
    curves: Sequence[Curve[LayoutT]]
    points: Sequence[Point[LayoutT]]
    pick: Point[LayoutT] | None
    references: Sequence[Reference[LayoutT]]

    def retained(self, curve: Curve[LayoutT]) -> int:
        """How many points of a curve are on the whole frontier: all, where parts are not compared."""
        return sum(point.part == curve.part for point in self.points)

    def curve_of(self, point: Point[LayoutT]) -> Curve[LayoutT]:
        """The curve that a point is from."""
        return next(curve for curve in self.curves if curve.part == point.part)


def point_document(subject: Subject[LayoutT], point: Point[LayoutT]) -> dict[str, object]:
    """A point with its layout."""
    return {
        "time_s": point.time_s,
        "memory_bytes": point.memory_bytes,
        "cost_usd": point.cost_usd,
        "devices": point.devices,
        "part": point.part.name,
        "idle": asdict(subject.curves.idle_of(point.part)),
        "layout": subject.layout(point),
    }


def frontier_document(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> dict[str, object]:
    """The whole answer."""
    return {
        "schema": "shardwise.frontier",
        "version": VERSION,
        **subject.question(),
        "mode": found.mode,
        "objectives": list(found.objectives),
        "memory_limit_bytes": found.limit_bytes if isfinite(found.limit_bytes) else None,
        "points": [point_document(subject, point) for point in found.points],
        "chosen": None if found.pick is None else point_document(subject, found.pick),
        "references": [
            {"name": reference.name, "fits": reference.fits, **point_document(subject, reference.point)}
            for reference in found.references
        ],
        "profile": [_profile(curve, found) for curve in found.curves],
        "search_s": sum(curve.search_s for curve in found.curves),
        "search_cpu_s": sum(curve.search_cpu_s for curve in found.curves),
        "epsilon": found.epsilon,
        **subject.sizes(),
        "certificate": subject.certificate(found.curves),
    }


def _profile(curve: Curve[LayoutT], found: FrontierAnswer[LayoutT]) -> Mapping[str, object]:
    """What a device count is known by, without layouts; null where there is no such point."""
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
    }


def _figures(point: Point[LayoutT] | None) -> Mapping[str, object] | None:
    if point is None:
        return None
    return {
        "time_s": point.time_s,
        "memory_bytes": point.memory_bytes,
        "device_s": point.device_s,
        "cost_usd": point.cost_usd,
    }
