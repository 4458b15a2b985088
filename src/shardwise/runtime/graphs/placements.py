"""What each rank of a mesh holds of a tensor: its part of every dim, all of it, or a partial sum.

The ranks of a mesh and their process groups, one for every set of axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Literal

from torch import distributed
from torch.distributed import ProcessGroup

from shardwise.graph import PARTIAL, REPLICATE, REPLICATE_SHARD_STATES, REPLICATE_SUM_GRAD, Placement
from shardwise.runtime.mesh import group_among

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


class ProcessMesh:
    """A mesh of `counts` ranks per axis, the outermost first, and where this process is on it.

    Of several `meshes` alike, of as many ranks in a row each, it is the one that this process is on, with the
    number `mesh`. Every process of the default group must make it at the same point, for it makes groups; a
    grid of one rank needs no processes.
    """

    def __init__(self, counts: Sequence[int], *, meshes: int = 1) -> None:
        self.counts = tuple(counts)
        self.meshes, size = meshes, prod(self.counts)
        self.rank = 0 if size * meshes == 1 else distributed.get_rank()
        self.mesh = self.rank // size
        self.ranks = {at: self.mesh * size + place for place, at in enumerate(mesh_coordinates(self.counts))}
        self.here: Coordinates = list(self.ranks)[self.rank % size]
        self._groups: Mapping[tuple[int, ...], ProcessGroup | None] = {} if size == 1 else self._made()

    def _made(self) -> dict[tuple[int, ...], ProcessGroup | None]:
        axes = [axis for axis, count in enumerate(self.counts) if count > 1]
        own = min(self.ranks.values())
        found: dict[tuple[int, ...], ProcessGroup | None] = {}
        for size in range(1, len(axes) + 1):
            for chosen in combinations(axes, size):
                rows = sorted({tuple(self.members(chosen, at)) for at in self.ranks})
                everywhere = [
                    sorted(mesh * len(self.ranks) + self.ranks[at] - own for at in row)
                    for mesh in range(self.meshes)
                    for row in rows
                ]
                found[chosen] = group_among(everywhere)
        return found

    def size(self, axes: Sequence[int]) -> int:
        """How many ranks differ along `axes` alone."""
        return prod(self.counts[axis] for axis in axes)

    def members(self, axes: Sequence[int], at: Coordinates | None = None) -> list[Coordinates]:
        """The ranks that differ from `at` (this one) along `axes` alone, in the order of their group."""
        start = self.here if at is None else at
        ranges = [range(count) if axis in axes else (start[axis],) for axis, count in enumerate(self.counts)]
        return list(product(*ranges))

    def group(self, axes: Sequence[int]) -> ProcessGroup | None:
        """The process group of `members(axes)`."""
        return self._groups[tuple(axis for axis in sorted(axes) if self.counts[axis] > 1)]

    def peer_rank(self, meshes: int) -> int:
        """The rank that lies where this one does, so many meshes further on."""
        return self.rank + meshes * len(self.ranks)
