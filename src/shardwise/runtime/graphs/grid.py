"""The ranks of a mesh and their process groups, one for every set of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod

from torch import distributed
from torch.distributed import ProcessGroup

from shardwise.runtime.graphs.forms import Coordinates, places


class Grid:
    """A mesh of `counts` ranks per axis, the outermost first, and where this process is on it.

    Every process of the default group must make it at the same point, for it makes groups; a grid of one rank
    needs no processes.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.ranks = {at: rank for rank, at in enumerate(places(self.counts))}
        alone = len(self.ranks) == 1
        self.rank = 0 if alone else distributed.get_rank()
        self.here: Coordinates = list(self.ranks)[self.rank]
        self._groups: Mapping[tuple[int, ...], ProcessGroup | None] = {} if alone else self._made()

    def _made(self) -> dict[tuple[int, ...], ProcessGroup | None]:
        axes = [axis for axis, count in enumerate(self.counts) if count > 1]
        found: dict[tuple[int, ...], ProcessGroup | None] = {}
        for size in range(1, len(axes) + 1):
            for chosen in combinations(axes, size):
                rows = {tuple(self.members(chosen, at)) for at in self.ranks}
                everywhere = [sorted(self.ranks[at] for at in row) for row in sorted(rows)]
                if len(everywhere) == 1:
                    found[chosen] = distributed.group.WORLD
                else:
                    found[chosen], _ = distributed.new_subgroups_by_enumeration(everywhere)
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
