"""What is drawn, independent of what produced it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point: seconds per step, bytes per device, what is said of it, a line each, and what `more` is said
    on hover alone."""

    time_s: float
    memory_bytes: float
    lines: tuple[str, ...]
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A frontier: dots, fastest first, and the place of its knee, where it has one."""

    name: str
    dots: tuple[Dot, ...]
    knee: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with a name, on a line or off it."""

    name: str
    dot: Dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Time against memory: lines in their order, one at least with a dot; marks; a limit of memory, or
    None."""

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
