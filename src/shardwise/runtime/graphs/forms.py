"""What each rank of a mesh holds of a tensor: its part of every dim, all of it, or a partial sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from shardwise.graph import PARTIAL, REPLICATE, REPLICATE_SHARD_STATES, REPLICATE_SUM_GRAD, Placement

AxisPlacement = int | Literal["whole", "partial"]
"""Along one mesh axis: a part of the dim of this number, the whole tensor, or a partial sum of it."""

Box = tuple[tuple[int, int], ...]
"""The first element and the one behind the last, along every dim."""

Coordinates = tuple[int, ...]
"""A rank by its place along every axis."""


@dataclass(frozen=True, slots=True)
class MeshPlacements:
    """What ranks hold, one word per mesh axis, the outermost first; `units` are the elements that stay
    together along the dim that an axis splits."""

    by_axis: tuple[AxisPlacement, ...]
    units: tuple[int, ...]

    def with_axes_of(self, axes: Sequence[int], other: MeshPlacements) -> MeshPlacements:
        """The same, but along `axes` as `other` has it."""
        return MeshPlacements(
            tuple(
                other.by_axis[at] if at in axes else placement for at, placement in enumerate(self.by_axis)
            ),
            tuple(other.units[at] if at in axes else unit for at, unit in enumerate(self.units)),
        )

    def with_axes_as(self, axes: Sequence[int], placement: AxisPlacement) -> MeshPlacements:
        """The same, but `placement` along `axes`."""
        return MeshPlacements(
            tuple(placement if at in axes else own for at, own in enumerate(self.by_axis)), self.units
        )


_VALUES: dict[int, AxisPlacement] = {
    REPLICATE: "whole",
    REPLICATE_SUM_GRAD: "whole",
    REPLICATE_SHARD_STATES: "whole",
    PARTIAL: "partial",
}
_GRADIENTS: dict[int, AxisPlacement] = {REPLICATE: "whole", REPLICATE_SUM_GRAD: "partial", PARTIAL: "whole"}


def value_placements(placements: Sequence[Placement], units: Sequence[int] | None = None) -> MeshPlacements:
    """What ranks hold of a tensor that lies so."""
    return _placements_of(tuple(_VALUES.get(each, int(each)) for each in placements), units)


def gradient_placements(
    placements: Sequence[Placement], units: Sequence[int] | None = None
) -> MeshPlacements:
    """What ranks hold of the gradient of a tensor that lies so."""
    return _placements_of(tuple(_GRADIENTS.get(each, int(each)) for each in placements), units)


def _placements_of(by_axis: tuple[AxisPlacement, ...], units: Sequence[int] | None) -> MeshPlacements:
    own = units or (1,) * len(by_axis)
    return MeshPlacements(
        by_axis,
        tuple(u if isinstance(placement, int) else 1 for placement, u in zip(by_axis, own, strict=True)),
    )


def replicated_placements(axes: int) -> MeshPlacements:
    """Every rank of a mesh of so many axes has everything."""
    everything: AxisPlacement = "whole"
    return MeshPlacements((everything,) * axes, (1,) * axes)


def shard_range(start: int, stop: int, count: int, index: int, unit: int) -> tuple[int, int]:
    """The part with number `index` of `count` parts of a run of elements, in whole units, the first parts one
    unit longer where they do not go evenly; element by element where another axis has cut units apart."""
    unit = unit if (stop - start) % unit == 0 else 1
    each, longer = divmod((stop - start) // unit, count)
    first = start + (each * index + min(index, longer)) * unit
    return first, first + (each + (index < longer)) * unit


def box_of(shape: Sequence[int], counts: Sequence[int], placements: MeshPlacements, at: Coordinates) -> Box:
    """What the rank at `at` of a mesh of `counts` ranks per axis has of a tensor of `shape`."""
    box = [(0, size) for size in shape]
    for axis, placement in enumerate(placements.by_axis):
        if isinstance(placement, int):
            box[placement] = shard_range(*box[placement], counts[axis], at[axis], placements.units[axis])
    return tuple(box)


def mesh_coordinates(counts: Sequence[int]) -> Iterator[Coordinates]:
    """Every rank of a mesh, in order: the last axis is the fastest."""
    return product(*map(range, counts))


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < stop for first, stop in common) else None


def within(inner: Box, outer: Box) -> bool:
    """Whether `outer` has all of `inner`."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def elements(box: Box | None) -> int:
    """How many elements a box has."""
    return 0 if box is None else prod(stop - first for first, stop in box)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - first for first, stop in box)


def slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that is `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def boxes_of_range(sizes: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The boxes that make up the elements `first` to before `stop` of a tensor of `sizes`, counted row by
    row: in their order, and each of elements that follow one another."""
    if first >= stop:
        return
    if not sizes:
        yield ()
        return
    inner = sizes[1:]
    (row, before), (last, stop_offset) = (divmod(at, prod(inner)) for at in (first, stop))
    if row == last:
        yield from (((row, row + 1), *box) for box in boxes_of_range(inner, before, stop_offset))
        return
    if before:
        yield from (((row, row + 1), *box) for box in boxes_of_range(inner, before, prod(inner)))
        row += 1
    if row < last:
        yield ((row, last), *((0, size) for size in inner))
    yield from (((last, last + 1), *box) for box in boxes_of_range(inner, 0, stop_offset))
