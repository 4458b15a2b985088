"""What others see of the parts of a chain, as axes: each hub of the chain, then the entry and the exit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, FactorGraph, Segment, shared_sizes

Sums = npt.NDArray[np.float64]
"""(choices of each hub, or 1 where it makes no difference..., choices at borders..., weights)."""


@dataclass(frozen=True, slots=True)
class SeparatorAxes:
    """The hubs of a chain, in one order, and how many choices each has."""

    shared: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(chain: Chain) -> SeparatorAxes:
        """Those of a chain."""
        found = shared_sizes(chain)
        return SeparatorAxes(tuple(found), tuple(found.values()))

    def start(self, weights: int) -> Sums:
        """Nothing yet: (1..., 1, weights)."""
        return np.zeros((*(1 for _ in self.shared), 1, weights))

    def variables(self, part: FactorGraph) -> dict[int, int]:
        """What others see of a part, by the number that it has in tables along the chain: of hubs below 0, so
        that they come first; entry 0 and exit 1."""
        numbers = (*range(-len(self.shared), 0), 0, 1)
        own = zip(numbers, self._axes(part), strict=True)
        return {number: variable for number, variable in own if variable is not None}

    def to_axes(self, part: FactorGraph, table: Sums) -> Sums:
        """A table on what others see of a part, variables by their numbers, as (hubs..., entry, exit,
        weights), of 1 where it has none."""
        own = self._axes(part)
        there = [part.separator.index(variable) for variable in own if variable is not None]
        sizes = (1 if variable is None else part.sizes[variable] for variable in own)
        return table.transpose((*there, len(there))).reshape((*sizes, table.shape[-1]))

    def from_axes(self, part: FactorGraph, values: Sums) -> Sums:
        """The least of values (hubs..., entry, exit, weights) for what others see of a part, as a table."""
        own = self._axes(part)
        values = self.min_marginal(values, [name for name, _ in part.shared])
        there = [variable for variable in own if variable is not None]
        values = values.reshape((*(part.sizes[variable] for variable in there), values.shape[-1]))
        return values.transpose((*(there.index(variable) for variable in part.separator), len(there)))

    def min_marginal(self, values: Sums, shared: Collection[str]) -> Sums:
        """The least of values (hubs..., any...) for each choice of these hubs, the others left out: (these
        hubs..., any...)."""
        away = tuple(axis for axis, name in enumerate(self.shared) if name not in shared)
        rest = values.shape[len(self.shared) :]
        shape = (size for name, size in zip(self.shared, self.sizes, strict=True) if name in shared)
        return np.broadcast_to(values.min(axis=away) if away else values, (*shape, *rest))

    def _axes(self, part: FactorGraph) -> list[int | None]:
        """The variable of each axis."""
        at = dict(part.shared)
        return [*(at.get(name) for name in self.shared), part.entry, part.exit]


def shared_of(segments: Collection[Segment]) -> set[str]:
    """The hubs that any of some links has."""
    return {name for segment in segments for _, part in segment.modes for name, _ in part.shared}
