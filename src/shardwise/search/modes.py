"""What is asked of curves of time against memory: on which devices to look, and which point to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from shardwise.frontier import non_dominated
from shardwise.search.curves import Curve, CurveSource, Point
from shardwise.search.drive import Progress
from shardwise.ties import ties_of_least

MODES = ("time", "devices", "profile")
"""The fastest point; the fewest devices on which a point fits, and the fastest there; all, for the user to
choose."""

LayoutT = TypeVar("LayoutT")


def curves_for(
    source: CurveSource[LayoutT],
    *,
    mode: str,
    sizes: Sequence[int] | None,
    limit_bytes: float,
    epsilon: float = 0.0,
    progress: Progress | None = None,
) -> list[Curve[LayoutT]]:
    """The curves on the parts with the device counts `sizes`; where None, on those that the mode is about.

    That is every part where any may be used for `time`; for `devices` all parts of the cluster, from the
    smallest to the first on which a point takes at most `limit_bytes`; for `profile` one device, twice as
    many, and so on, and all. Of parts those on which the request is possible. ConfigError where one of
    `sizes` has none, or none that the mode is about.
    """
    if uses_any_part(mode, sizes):
        source.require(None)
        return [source.curve(part, epsilon=epsilon, progress=progress) for part in source.parts(None)]
    stops_early = mode == "devices" and sizes is None
    if sizes is None:
        sizes = source.sizes if mode == "devices" else doubled(source.sizes, source.cluster.devices)
    sizes = sizes or (source.cluster.devices,)
    source.require(sizes)
    curves: list[Curve[LayoutT]] = []
    for devices in sizes:
        found = [source.curve(part, epsilon=epsilon, progress=progress) for part in source.parts(devices)]
        curves += found
        points = [point for curve in found for point in curve.points]
        if stops_early and chosen(points, mode=mode, limit_bytes=limit_bytes) is not None:
            break
    return curves


def uses_any_part(mode: str, sizes: Sequence[int] | None) -> bool:
    """Whether points on all parts are compared, whatever their device counts."""
    return mode == "time" and sizes is None


def doubled(sizes: Sequence[int], whole: int) -> tuple[int, ...]:
    """Those of `sizes` that are powers of two, or `whole`."""
    return tuple(size for size in sizes if size & (size - 1) == 0 or size == whole)


def points_of(
    curves: Sequence[Curve[LayoutT]], *, weighs_cost: bool, any_part: bool = False
) -> tuple[Point[LayoutT], ...]:
    """The whole frontier: of each device count the points that no other there beats in time or memory
    without losing in the other, in the order of curves; where `any_part`, of all counts together.

    On one part cost is proportional to time, and changes nothing. Where `weighs_cost`, points on different
    parts are compared too: one stays if no other is at most as large in time, memory and cost and smaller in
    one of them. All costs are known then.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ()
    costs = [point.cost_usd if weighs_cost else 0.0 for point in points]
    counts = [0 if weighs_cost or any_part else point.devices for point in points]
    figures = [(point.time_s, point.memory_bytes, cost) for point, cost in zip(points, costs, strict=True)]
    best = non_dominated(np.array(figures), groups=np.array(counts, dtype=np.intp))
    return tuple(points[place] for place in (best if any_part else sorted(best.tolist())))


def chosen(points: Sequence[Point[LayoutT]], *, mode: str, limit_bytes: float) -> Point[LayoutT] | None:
    """The pick of a mode among the points that take at most `limit_bytes`; None where there is none, and in
    the mode `profile`, which leaves the choice to the user. Of equals the smaller, then that on fewer
    devices, then the first."""
    fitting = [point for point in points if point.memory_bytes <= limit_bytes]
    if not fitting or mode == "profile":
        return None
    if mode == "devices":
        return _least(fitting, "devices", "time_s", "memory_bytes")
    return _least(fitting, "time_s", "memory_bytes", "devices")


def smallest(points: Sequence[Point[LayoutT]]) -> Point[LayoutT]:
    """The point of least memory, of equals the fastest."""
    return _least(points, "memory_bytes", "time_s", "devices")


def _least(points: Sequence[Point[LayoutT]], *figures: str) -> Point[LayoutT]:
    """The first point that is least in the first of these figures, of equals in the second, and so on."""
    left = list(points)
    for name in figures:
        equal = np.flatnonzero(ties_of_least([getattr(point, name) for point in left]))
        left = [left[place] for place in equal.tolist()]
    return left[0]
