"""The ranks of a mesh and their process groups, one for every set of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod

from torch import distributed
from torch.distributed import ProcessGroup

from shardwise.runtime.graphs.forms import Coordinates, mesh_coordinates
from shardwise.runtime.groups import group_among


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
