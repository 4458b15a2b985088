"""The contents of a plot, independent of their source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point: seconds per step, bytes per device, its description in `lines`, and further lines `more` that
    only hovering shows."""

    time_s: float
    memory_bytes: float
    lines: tuple[str, ...]
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A frontier: dots, fastest first, and the index of its knee, or None."""

    name: str
    dots: tuple[Dot, ...]
    knee: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A named point, on a line or not."""

    name: str
    dot: Dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot of step time and memory: lines in order, at least one with a dot; marks; a memory limit in
    bytes, or None."""

    title: str
    subtitle: str
    lines: tuple[PlotLine, ...]
    marks: tuple[Mark, ...] = ()
    limit_bytes: float | None = None

    def dots(self) -> Iterator[tuple[str, Dot]]:
        """Every dot with the name of its line or mark, lines first."""
        for line in self.lines:
            for dot in line.dots:
                yield line.name, dot
        for mark in self.marks:
            yield mark.name, mark.dot
