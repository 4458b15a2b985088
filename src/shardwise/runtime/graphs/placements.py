"""Placements of tensors on a mesh of ranks, and the process groups of the mesh.

`MeshPlacements` gives, per mesh axis, a shard of a dim, a replica, or a partial sum. A `Box` is a rank's
region of a tensor. `ProcessMesh` has one process group for every set of axes.
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

# Placements and boxes

AxisPlacement = int | Literal["whole", "partial"]
"""Placement along one mesh axis: shard of the dim with this number, replicated, or partial sum."""

Box = tuple[tuple[int, int], ...]
"""The first element and the one after the last, along every dim."""

Coordinates = tuple[int, ...]
"""A rank's index along every mesh axis."""


@dataclass(frozen=True, slots=True)
class MeshPlacements:
    """The placements of a tensor, one per mesh axis, outermost first.

    `units` are the elements that stay together along the sharded dim of each axis.
    """

    by_axis: tuple[AxisPlacement, ...]
    units: tuple[int, ...]

    def with_axes_of(self, axes: Sequence[int], other: MeshPlacements) -> MeshPlacements:
        """These placements, with those of `other` along `axes`."""
        return MeshPlacements(
            tuple(
                other.by_axis[at] if at in axes else placement for at, placement in enumerate(self.by_axis)
            ),
            tuple(other.units[at] if at in axes else unit for at, unit in enumerate(self.units)),
        )

    def with_axes_as(self, axes: Sequence[int], placement: AxisPlacement) -> MeshPlacements:
        """These placements, with `placement` along `axes`."""
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
    """Placements of the values of a tensor."""
    return _placements_of(tuple(_VALUES.get(each, int(each)) for each in placements), units)


def gradient_placements(
    placements: Sequence[Placement], units: Sequence[int] | None = None
) -> MeshPlacements:
    """Placements of the gradient of a tensor."""
    return _placements_of(tuple(_GRADIENTS.get(each, int(each)) for each in placements), units)


def _placements_of(by_axis: tuple[AxisPlacement, ...], units: Sequence[int] | None) -> MeshPlacements:
    own = units or (1,) * len(by_axis)
    return MeshPlacements(
        by_axis,
        tuple(u if isinstance(placement, int) else 1 for placement, u in zip(by_axis, own, strict=True)),
    )


def replicated_placements(axes: int) -> MeshPlacements:
    """Replicated on all ranks of a mesh with this number of axes."""
    everything: AxisPlacement = "whole"
    return MeshPlacements((everything,) * axes, (1,) * axes)


def shard_range(start: int, stop: int, count: int, index: int, unit: int) -> tuple[int, int]:
    """The shard `index` of `count` of the elements from `start` to before `stop`, in whole units.

    The first shards are one unit longer where `count` does not divide the units. Where another axis has split
    units apart, shards are split by element.
    """
    unit = unit if (stop - start) % unit == 0 else 1
    each, longer = divmod((stop - start) // unit, count)
    first = start + (each * index + min(index, longer)) * unit
    return first, first + (each + (index < longer)) * unit


def box_of(shape: Sequence[int], counts: Sequence[int], placements: MeshPlacements, at: Coordinates) -> Box:
    """The region that the rank at `at` has of a tensor of `shape`, on a mesh of `counts` ranks per axis."""
    box = [(0, size) for size in shape]
    for axis, placement in enumerate(placements.by_axis):
        if isinstance(placement, int):
            box[placement] = shard_range(*box[placement], counts[axis], at[axis], placements.units[axis])
    return tuple(box)


def mesh_coordinates(counts: Sequence[int]) -> Iterator[Coordinates]:
    """Every rank of a mesh in order; the last axis varies fastest."""
    return product(*map(range, counts))


def intersection(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None where it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < stop for first, stop in common) else None


def within(inner: Box, outer: Box) -> bool:
    """Whether `outer` contains `inner`."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def elements(box: Box | None) -> int:
    """Number of elements of a box; zero for None."""
    return 0 if box is None else prod(stop - first for first, stop in box)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - first for first, stop in box)


def slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The slices of `inner` in a tensor whose region is `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def boxes_of_range(sizes: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `first` to before `stop` of a tensor of `sizes`, in row-major order.

    Each box is contiguous in memory.
    """
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


# Process mesh


class ProcessMesh:
    """A mesh of `counts` ranks per axis, outermost first, and the coordinates of this process on it.

    With several equal `meshes` of consecutive ranks, it is the mesh of this process, number `mesh`. The
    constructor creates process groups: every process of the default group calls it at the same point. A mesh
    of one rank needs no process group.
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
        """Number of ranks that differ along `axes` only."""
        return prod(self.counts[axis] for axis in axes)

    def members(self, axes: Sequence[int], at: Coordinates | None = None) -> list[Coordinates]:
        """The ranks that differ from `at` (default: this rank) along `axes` only, in the order of their
        group."""
        start = self.here if at is None else at
        ranges = [range(count) if axis in axes else (start[axis],) for axis, count in enumerate(self.counts)]
        return list(product(*ranges))

    def group(self, axes: Sequence[int]) -> ProcessGroup | None:
        """The process group of `members(axes)`."""
        return self._groups[tuple(axis for axis in sorted(axes) if self.counts[axis] > 1)]

    def peer_rank(self, meshes: int) -> int:
        """The rank with the same index, `meshes` meshes further on."""
        return self.rank + meshes * len(self.ranks)
