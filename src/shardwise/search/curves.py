"""Time against memory on parts of a cluster: the points, the curves that they form, and what yields them.

Nothing in here knows what a layout is: a strategy of a transformer, or a layout for each operator of a graph.

What is asked of curves of time against memory: on which devices to look, and which point to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from shardwise.cluster import Cluster
from shardwise.errors import Infeasible
from shardwise.pareto import knee, non_dominated
from shardwise.plans import Idle
from shardwise.search.bnb.solver import Progress
from shardwise.ties import ties_of_least

LayoutT_co = TypeVar("LayoutT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Generic[LayoutT_co]):
    """One way to train on a part of a cluster: seconds per step, bytes on the device that holds most, dollars
    per step (None where a price is not known), and the layout that has these."""

    time_s: float
    memory_bytes: float
    cost_usd: float | None
    part: Cluster
    layout: LayoutT_co

    @property
    def devices(self) -> int:
        """The devices that it uses."""
        return self.part.devices

    @property
    def device_s(self) -> float:
        """Device-seconds per step."""
        return self.devices * self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Generic[LayoutT_co]):
    """The whole frontier of time against memory on all devices of a part of a cluster: non-dominated points,
    fastest first; none where nothing fits. `epsilon` is what it may be off, relative: 0 is exact. `search_s`
    and `search_cpu_s` are what finding it took."""

    part: Cluster
    points: tuple[Point[LayoutT_co], ...]
    epsilon: float
    search_s: float
    search_cpu_s: float

    @property
    def devices(self) -> int:
        """The devices of its part."""
        return self.part.devices

    @property
    def knee(self) -> Point[LayoutT_co] | None:
        """The point after which memory gets dear (`frontier.knee`), None where there is none."""
        place = knee(np.array([(point.time_s, point.memory_bytes) for point in self.points]))
        return None if place is None else self.points[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference(Generic[LayoutT_co]):
    """A point by the custom of the field, for a curve to be held beside: its name, and whether it `fits` into
    the memory that may be used."""

    name: str
    point: Point[LayoutT_co]
    fits: bool


class CurveSource(Protocol[LayoutT_co]):
    """What yields curves: the strategies of a transformer, or the layouts of a graph's operators."""

    @property
    def cluster(self) -> Cluster:
        """The whole cluster."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The device counts of the parts that can be requested, ascending, and that of the whole cluster
        where the request is possible there."""
        ...

    def parts(self, devices: int | None) -> tuple[Cluster, ...]:
        """The parts with so many devices, one of `sizes`; where None, every part where any may be used, the
        largest last. Those on which the request is possible."""
        ...

    def idle_of(self, part: Cluster) -> Idle:
        """What is left of the cluster where one of `parts` is used."""
        ...

    def require(self, sizes: Sequence[int] | None) -> None:
        """ConfigError, with what is allowed, where there is no part of one of `sizes` (where None, no part at
        all), or where something that was given is of use on none of them."""
        ...

    def curve(
        self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None
    ) -> Curve[LayoutT_co]:
        """The frontier on all devices of a part; no point that could be had is by more than a factor 1 +
        `epsilon` better in all objectives than every point of it. An interrupt is passed on."""
        ...

    def references(self, part: Cluster) -> tuple[Reference[LayoutT_co], ...]:
        """The usual layouts on a part: data parallelism, and Megatron's layout of a transformer; each where
        it can be. None on one device."""
        ...

    def nothing_fits(self, curve: Curve[Any]) -> Infeasible:
        """Why one of its curves has no point, and what would help."""
        ...

    def closest(self, curve: Curve[Any]) -> Point[LayoutT_co] | None:
        """Where one of its curves has no point: what takes least memory of all, though it does not fit; None
        where there is nothing."""
        ...


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
