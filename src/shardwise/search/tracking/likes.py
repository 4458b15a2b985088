"""Which tables of a part are alike, such as those of layers that all read one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.flat import Views
from shardwise.search.tracking.labels import Labels
from shardwise.search.tracking.scalars import Scalars, Sums
from shardwise.search.tracking.steps import Step

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Likes:
    """Which tables of a part are alike, by the first of each, and the steps that make them."""

    scalars: Scalars
    steps: dict[int, Step]
    alike: dict[int, list[int]]

    @staticmethod
    def of(scalars: Scalars) -> Likes:
        """Of a part's tables as weighted sums."""
        alike: dict[int, list[int]] = {}
        for table, first in scalars.made.items():
            alike.setdefault(first, []).append(table)
        return Likes(scalars, {step.output: step for step in scalars.order.steps}, alike)

    def first(self, table: int) -> int:
        """The first table that is like this one."""
        return self.scalars.made[table]

    def least(self, sums: dict[int, Sums] | Views, table: int) -> Values:
        """The least, in all that are like a table, of sums by table, its variables in ascending order."""
        order = np.argsort(self.scalars.axes[table])
        rows = [sums[like] for like in self.alike[self.first(table)]]
        return np.asarray(np.minimum.reduce(rows).transpose((*order, len(order))))

    def renamed(self, labels: Labels, table: int) -> Labels:
        """The labels of the first table that is like `table`, with the variables of that."""
        return labels.renamed(self.names(self.first(table), table))

    def names(self, first: int, table: int) -> dict[int, int]:
        """The variables of a table, and of all that it is made of, by those of one like it."""
        axes = self.scalars.axes
        names = dict(zip(axes[first], axes[table], strict=True))
        if first in self.steps:
            ours, theirs = self.steps[first], self.steps[table]
            if ours.variable is not None and theirs.variable is not None:
                names[ours.variable] = theirs.variable
            for own, other in zip(ours.inputs, theirs.inputs, strict=True):
                names |= self.names(own, other)
        return names
