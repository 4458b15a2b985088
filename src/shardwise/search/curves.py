"""Time against memory on several device counts: the points, the curves that they form, and what yields them.

Nothing in here knows what a layout is: a strategy of a transformer, or a layout for each operator of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from shardwise.errors import ConfigError, Infeasible
from shardwise.frontier import knee
from shardwise.search.drive import Progress

LayoutT_co = TypeVar("LayoutT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Generic[LayoutT_co]):
    """One way to train on so many devices: seconds per step, bytes on the device that holds most, dollars per
    step (None where a price is not known), and the layout that has these."""

    time_s: float
    memory_bytes: float
    cost_usd: float | None
    devices: int
    layout: LayoutT_co

    @property
    def device_s(self) -> float:
        """Device-seconds per step."""
        return self.devices * self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Generic[LayoutT_co]):
    """The whole frontier of time against memory on `devices` devices: non-dominated points, fastest first;
    none where nothing fits. `epsilon` is what it may be off, relative: 0 is exact. `search_s` and
    `search_cpu_s` are what finding it took."""

    devices: int
    points: tuple[Point[LayoutT_co], ...]
    epsilon: float
    search_s: float
    search_cpu_s: float

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
    def whole(self) -> int:
        """The devices of the whole cluster."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Device counts that can be asked about, ascending: parts of the cluster, and the whole of it where
        what was asked is possible there."""
        ...

    def require(self, sizes: Sequence[int]) -> None:
        """ConfigError, with what is allowed, where one of `sizes` cannot be asked about, or where something
        that was given is of use on none of them."""
        ...

    def curve(
        self, devices: int, *, epsilon: float = 0.0, progress: Progress | None = None
    ) -> Curve[LayoutT_co]:
        """The frontier on so many devices, one of `sizes`; no point that could be had is by more than a
        factor 1 + `epsilon` better in all objectives than every point of it. An interrupt is passed on."""
        ...

    def references(self, devices: int) -> tuple[Reference[LayoutT_co], ...]:
        """What is customary on so many devices: data parallelism, and Megatron's layout of a transformer;
        each where it can be. None on one device."""
        ...

    def nothing_fits(self, curve: Curve[Any]) -> Infeasible:
        """Why one of its curves has no point, and what would help."""
        ...

    def closest(self, curve: Curve[Any]) -> Point[LayoutT_co] | None:
        """Where one of its curves has no point: what takes least memory of all, though it does not fit; None
        where there is nothing."""
        ...


def require_parts(sizes: Sequence[int], parts: Sequence[int]) -> None:
    """ConfigError where one of `sizes` is not one of the `parts` of a cluster."""
    for size in sizes:
        if size not in parts:
            raise ConfigError(
                "is no part of the cluster", key="--devices", found=str(size), allowed=runs_text(parts)
            )


def runs_text(sizes: Sequence[int]) -> str:
    """Ascending sizes as runs: `1 to 8, 16, 24`; at most eight of them."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], "...", texts[-1]])
