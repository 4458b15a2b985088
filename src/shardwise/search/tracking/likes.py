"""Which tables of a part are alike, such as those of layers that all read one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.flat import TableViews
from shardwise.search.tracking.labels import Labels
from shardwise.search.tracking.scalars import FactorSums, Sums
from shardwise.search.tracking.steps import EliminationStep

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class EqualTables:
    """Which tables of a part are alike, by the first of each, and the steps that make them."""

    factor_sums: FactorSums
    steps: dict[int, EliminationStep]
    equal_tables_of: dict[int, list[int]]

    @staticmethod
    def of(factor_sums: FactorSums) -> EqualTables:
        """Of a part's tables as weighted sums."""
        equal_tables_of: dict[int, list[int]] = {}
        for table, first in factor_sums.made.items():
            equal_tables_of.setdefault(first, []).append(table)
        return EqualTables(
            factor_sums, {step.output: step for step in factor_sums.order.steps}, equal_tables_of
        )

    def first(self, table: int) -> int:
        """The first table that is like this one."""
        return self.factor_sums.made[table]

    def least(self, sums: dict[int, Sums] | TableViews, table: int) -> Values:
        """The least, in all that are like a table, of sums by table, its variables in ascending order."""
        order = np.argsort(self.factor_sums.axes[table])
        rows = [sums[like] for like in self.equal_tables_of[self.first(table)]]
        return np.asarray(np.minimum.reduce(rows).transpose((*order, len(order))))

    def renamed(self, labels: Labels, table: int) -> Labels:
        """The labels of the first table that is like `table`, with the variables of that."""
        return labels.renamed(self.names(self.first(table), table))

    def names(self, first: int, table: int) -> dict[int, int]:
        """The variables of a table, and of all that it is made of, by those of one like it."""
        axes = self.factor_sums.axes
        names = dict(zip(axes[first], axes[table], strict=True))
        if first in self.steps:
            ours, theirs = self.steps[first], self.steps[table]
            if ours.variable is not None and theirs.variable is not None:
                names[ours.variable] = theirs.variable
            for own, other in zip(ours.inputs, theirs.inputs, strict=True):
                names |= self.names(own, other)
        return names
