"""Which steps bring a tensor from what ranks hold of it to what they are to hold: no tensors, only boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

from shardwise.runtime.graphs.forms import (
    AxisPlacement,
    Box,
    Coordinates,
    MeshPlacements,
    box_of,
    elements,
    intersection,
    mesh_coordinates,
    within,
)

StepKind = Literal["cut", "reduce_scatter", "exchange", "all_reduce", "all_gather", "pad", "first_only"]


@dataclass(frozen=True, slots=True)
class RedistributeStep:
    """One step, among the ranks that differ along `axes`, after which ranks hold `then`.

    `cut`, `pad` (zeros around a part) and `first_only` (zeros on all ranks but the first of `axes`) are a
    rank's own doing. An `all_to_all` sends boxes from whoever has them to whoever needs them.
    """

    kind: StepKind
    axes: tuple[int, ...]
    then: MeshPlacements


_STEP_ORDER = ("cut", "reduce_scatter", "exchange", "all_reduce", "all_gather", "pad", "first_only")
"""What shrinks a tensor comes before what grows it (docs/concepts/pareto-search.md)."""


def _step_kind(start: AxisPlacement, end: AxisPlacement, units_differ: bool) -> str:
    """What an axis has to do, in a word; none where ranks have what they need."""
    if start == "whole":
        return {"whole": "none", "partial": "first_only"}.get(str(end), "cut")
    if start == "partial":
        return {"whole": "all_reduce", "partial": "none"}.get(str(end), "reduce_scatter")
    if isinstance(end, int):
        return "exchange" if end != start or units_differ else "none"
    return "all_gather" if end == "whole" else "pad"


@lru_cache(maxsize=4096)
def redistribute_path(
    shape: tuple[int, ...], counts: tuple[int, ...], start: MeshPlacements, end: MeshPlacements
) -> tuple[RedistributeStep, ...]:
    """The steps from `start` to `end` of a tensor of `shape` on a mesh of `counts` ranks per axis.

    Axes that need the same do it as one group. Where a dim is split along several axes and an outer one of
    them changes, parts change as a whole: those are exchanged among all ranks that have some of them.
    """
    kinds = [
        "none" if count == 1 else _step_kind(a, b, isinstance(a, int) and u != v)
        for a, b, u, v, count in zip(start.by_axis, end.by_axis, start.units, end.units, counts, strict=True)
    ]
    plan = _PathBuilder(shape, counts, start)
    for kind in _STEP_ORDER:
        axes = tuple(axis for axis, own in enumerate(kinds) if own == kind)
        if axes:
            plan.add(kind, axes, end)
    if plan.boxes(plan.now) != plan.boxes(end):  # an outer axis took the units of an inner one along
        plan.all_to_all(_axes_of_parts(end), end)
    return tuple(plan.path)


class _PathBuilder:
    """Steps so far, and what ranks hold behind them."""

    def __init__(self, shape: tuple[int, ...], counts: tuple[int, ...], start: MeshPlacements) -> None:
        self.shape, self.counts, self.now = shape, counts, start
        self.path: list[RedistributeStep] = []

    def boxes(self, placements: MeshPlacements) -> dict[Coordinates, Box]:
        return {at: box_of(self.shape, self.counts, placements, at) for at in mesh_coordinates(self.counts)}

    def step(self, kind: StepKind, axes: tuple[int, ...], then: MeshPlacements) -> None:
        self.path.append(RedistributeStep(kind, axes, then))
        self.now = then

    def add(self, kind: str, axes: tuple[int, ...], end: MeshPlacements) -> None:
        then = self.now.with_axes_of(axes, end)
        before, after = self.boxes(self.now), self.boxes(then)
        shrinks = all(within(after[at], before[at]) for at in before)
        grows = all(within(before[at], after[at]) for at in before)
        if kind == "exchange" and before == after:
            self.now = then  # in other units, and the same elements
        elif kind == "cut" and shrinks:
            self.step("cut", axes, then)
        elif kind == "reduce_scatter" and shrinks:
            self.step("reduce_scatter", axes, then)
        elif kind == "reduce_scatter":
            self.step("all_reduce", axes, self.now.with_axes_as(axes, "whole"))
            self.add("cut", axes, end)
        elif kind == "all_reduce":
            self.step("all_reduce", axes, then)
        elif kind == "first_only":
            self.step("first_only", axes, then)
        elif kind == "all_gather" and grows and self._covered(axes, after):
            self.step("all_gather", axes, then)
        elif kind == "pad" and grows:
            self.step("pad", axes, then)
        elif kind == "pad":
            self.all_to_all(axes, self.now.with_axes_as(axes, "whole"))
            self.step("first_only", axes, then)
        else:
            self.all_to_all(axes, then)

    def all_to_all(self, axes: tuple[int, ...], then: MeshPlacements) -> None:
        """Among the fewest ranks that have all that each of them needs."""
        after = self.boxes(then)
        others = [axis for axis in _axes_of_parts(self.now) if axis not in axes]
        for count in range(len(others) + 1):
            for more in combinations(others, count):
                chosen = tuple(sorted({*axes, *more}))
                if self._covered(chosen, after):
                    self.step("exchange", chosen, then)
                    return

    def _covered(self, axes: Sequence[int], after: dict[Coordinates, Box]) -> bool:
        """Whether every rank finds what it needs with those that differ from it along `axes`."""
        before = self.boxes(self.now)
        return all(
            sum(
                elements(intersection(before[other], box))
                for other in before
                if sends_to(self.now, axes, other, at)
            )
            == elements(box)
            for at, box in after.items()
        )


def sends_to(now: MeshPlacements, axes: Sequence[int], sender: Coordinates, receiver: Coordinates) -> bool:
    """Whether `receiver` takes what it needs of `sender`'s part, where ranks along `axes` exchange: of ranks
    that have the same it asks the one beside it."""
    return all(
        sender[axis] == receiver[axis] or (axis in axes and isinstance(placement, int))
        for axis, placement in enumerate(now.by_axis)
    )


def _axes_of_parts(placements: MeshPlacements) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(placements.by_axis) if isinstance(placement, int))
