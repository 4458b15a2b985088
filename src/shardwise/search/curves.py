"""Time against memory on parts of a cluster: the points, the curves that they form, and what yields them.

Nothing in here knows what a layout is: a strategy of a transformer, or a layout for each operator of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from shardwise.cluster import Cluster
from shardwise.errors import Infeasible
from shardwise.frontier import knee
from shardwise.plan import Idle
from shardwise.search.drive import Progress

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
