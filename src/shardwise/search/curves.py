"""Curves of step time against memory on parts of a cluster: `Point`, `Curve`, and their `CurveSource`.

`curves_for` selects the device counts of a mode, `points_of` merges curves into one frontier, and `chosen`
picks a point. The layout type is generic: a strategy of a transformer, or a layout of each operator of a
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from shardwise.cluster import Cluster, node_runs
from shardwise.errors import Infeasible
from shardwise.pareto import knee, non_dominated
from shardwise.plans import Idle
from shardwise.search.bnb.solver import Progress
from shardwise.ties import ties_of_least

LayoutT_co = TypeVar("LayoutT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Generic[LayoutT_co]):
    """One way to train on a part of a cluster: seconds per step, peak bytes over the devices, dollars per
    step (None if a price is unknown), and the layout."""

    time_s: float
    memory_bytes: float
    cost_usd: float | None
    part: Cluster
    layout: LayoutT_co

    @property
    def devices(self) -> int:
        """Number of devices of its part."""
        return self.part.devices

    @property
    def device_s(self) -> float:
        """Device-seconds per step."""
        return self.devices * self.time_s


SHARES = {0.75: "in 3/4", 0.5: "in 1/2", 0.25: "in 1/4", 0.125: "in 1/8"}
"""Shares of a device's memory, each with the name of the fastest point within it."""

DIFFERENT = 0.05
"""Least difference in memory of the highlights of a curve, as a share of the device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Generic[LayoutT_co]):
    """The Pareto frontier of step time and memory on all devices of a part of a cluster: non-dominated
    points, fastest first; empty if nothing fits. `epsilon` is its proven relative error (0: exact).
    `search_s` and `search_cpu_s` are the time and processor time of the search."""

    part: Cluster
    points: tuple[Point[LayoutT_co], ...]
    epsilon: float
    search_s: float
    search_cpu_s: float

    @property
    def devices(self) -> int:
        """Number of devices of its part."""
        return self.part.devices

    @property
    def device_bytes(self) -> float:
        """Memory of the smallest device of its part."""
        used = {node.device_class for node, _ in node_runs(self.part.nodes)}
        return min(self.part.classes[name].memory_bytes for name in used)

    @property
    def knee(self) -> Point[LayoutT_co] | None:
        """The slower point whose memory is worth its time (`pareto.knee`); None if the fastest point is."""
        figures = np.array([(point.time_s, point.memory_bytes) for point in self.points])
        place = knee(figures, self.device_bytes)
        return None if place is None else self.points[place]

    def highlights(self) -> dict[str, Point[LayoutT_co]]:
        """A handful of points that really differ, by name, fastest first: the fastest, the knee, the
        smallest, and the fastest within each of SHARES of the device's memory, where its memory differs from
        that of those before it in this list by more than DIFFERENT of the device's memory."""
        if not self.points:
            return {}
        named = {"fastest": self.points[0], "knee": self.knee, "smallest": self.points[-1]}
        for share, name in SHARES.items():
            within = (point for point in self.points if point.memory_bytes <= share * self.device_bytes)
            named[name] = next(within, None)
        found: dict[str, Point[LayoutT_co]] = {}
        for name, point in named.items():
            if point is None:
                continue
            least = DIFFERENT * self.device_bytes if name in SHARES.values() else 0.0
            if all(abs(point.memory_bytes - other.memory_bytes) > least for other in found.values()):
                found[name] = point
        return dict(sorted(found.items(), key=lambda item: self.points.index(item[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference(Generic[LayoutT_co]):
    """A baseline layout that a curve is compared with: its name, its point, and whether it `fits` into the
    usable memory."""

    name: str
    point: Point[LayoutT_co]
    fits: bool


class CurveSource(Protocol[LayoutT_co]):
    """Returns curves: over the strategies of a transformer, or over the layouts of the operators of a
    graph."""

    @property
    def cluster(self) -> Cluster:
        """The whole cluster."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The device counts of the parts that can be requested, ascending; the count of the whole cluster is
        included if the request is possible there."""
        ...

    def parts(self, devices: int | None) -> tuple[Cluster, ...]:
        """The parts with `devices` devices (one of `sizes`) on which the request is possible. If None: every
        part that may be used, the largest last."""
        ...

    def idle_of(self, part: Cluster) -> Idle:
        """The devices that are idle if `part`, one of `parts`, is used."""
        ...

    def require(self, sizes: Sequence[int] | None) -> None:
        """Raises ConfigError, with the allowed values, if one of `sizes` has no part (None: if there is no
        part at all), or if a given option applies to none of the parts."""
        ...

    def curve(
        self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None
    ) -> Curve[LayoutT_co]:
        """The Pareto frontier on all devices of a part: no feasible point is better than every point of the
        curve by more than a factor 1 + `epsilon` in all objectives. Interrupts propagate."""
        ...

    def references(self, part: Cluster) -> tuple[Reference[LayoutT_co], ...]:
        """The baseline layouts on a part: data parallelism, and Megatron's layout of a transformer, if they
        are possible. None on one device."""
        ...

    def nothing_fits(self, curve: Curve[Any]) -> Infeasible:
        """Why a curve of this source has no point, and which changes would help."""
        ...

    def closest(self, curve: Curve[Any]) -> Point[LayoutT_co] | None:
        """For a curve without points: the point of least memory, although it does not fit; None if there is
        no candidate."""
        ...


MODES = ("time", "devices", "profile")
"""`time`: the fastest point. `devices`: the fewest devices on which a point fits, and the fastest point
there. `profile`: all points, for the user to choose."""

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
    """The curves on the parts with the device counts `sizes`. If None, the mode chooses the parts on which
    the request is possible:

    - `time`: every part that may be used.
    - `devices`: all parts in ascending order, up to the first with a point of at most `limit_bytes`.
    - `profile`: one device, two, four and so on, and the whole cluster.

    Raises ConfigError if there is no such part.
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
    """Whether points on parts of all device counts are compared."""
    return mode == "time" and sizes is None


def doubled(sizes: Sequence[int], whole: int) -> tuple[int, ...]:
    """The powers of two among `sizes`, and `whole`."""
    return tuple(size for size in sizes if size & (size - 1) == 0 or size == whole)


def points_of(
    curves: Sequence[Curve[LayoutT]], *, weighs_cost: bool, any_part: bool = False
) -> tuple[Point[LayoutT], ...]:
    """The non-dominated points of all curves. Points are compared in time and memory: with those of the same
    device count, in the order of the curves; or with `any_part` across all counts, fastest first.

    On one part, cost is proportional to time and changes nothing. With `weighs_cost`, points on different
    parts are compared in time, memory and cost, and all costs must be known.
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
    """The pick of a mode among the points that take at most `limit_bytes`; None if there is none, and for
    `profile`. Ties go to less memory, then fewer devices, then the first point."""
    fitting = [point for point in points if point.memory_bytes <= limit_bytes]
    if not fitting or mode == "profile":
        return None
    if mode == "devices":
        return _least(fitting, "devices", "time_s", "memory_bytes")
    return _least(fitting, "time_s", "memory_bytes", "devices")


def smallest(points: Sequence[Point[LayoutT]]) -> Point[LayoutT]:
    """The point of least memory; ties go to the fastest."""
    return _least(points, "memory_bytes", "time_s", "devices")


def _least(points: Sequence[Point[LayoutT]], *figures: str) -> Point[LayoutT]:
    """The first point that is lexicographically least in these figures."""
    left = list(points)
    for name in figures:
        equal = np.flatnonzero(ties_of_least([getattr(point, name) for point in left]))
        left = [left[place] for place in equal.tolist()]
    return left[0]
