"""The weighted sums of a part in one array, and what machine code works out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from shardwise.frontier import COLUMNS, FactorGraph
from shardwise.search.tracking.steps import EliminationOrder

if TYPE_CHECKING:
    from shardwise.search.tracking.compiled_sums import EliminationProgram

PeakShares = tuple[tuple[int, float], ...]
"""Factors at which the peak is weighed, and the share of its weight at each: 1 together, or none."""

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@lru_cache(maxsize=256)
def program_of(order: EliminationOrder) -> EliminationProgram:
    """The steps of an order as the loops take them."""
    from shardwise.search.tracking.compiled_sums import EliminationProgram

    tables = [*order.factors, *(step.variables for step in order.steps)]
    return EliminationProgram(
        _starts(tables),
        _joined(tables),
        len(order.factors),
        _starts([step.inputs for step in order.steps]),
        _joined([step.inputs for step in order.steps]),
        np.array([-1 if step.variable is None else step.variable for step in order.steps], dtype=np.intp),
    )


_COSTS: WeakKeyDictionary[FactorGraph, Values] = WeakKeyDictionary()
"""What `costs_of` told, as long as its part is in use."""


def costs_of(part: FactorGraph) -> Values:
    """The costs of all factors one after the other, (6, cells): nothing in the columns where they are
    infinite, which the last row is."""
    if part not in _COSTS:
        _COSTS[part] = _costs(part)
    return _COSTS[part]


def _costs(part: FactorGraph) -> Values:
    every = np.concatenate([factor.costs.reshape((-1, len(COLUMNS))) for factor in part.factors])
    is_out = ~np.isfinite(every).all(axis=1)
    every[is_out] = 0.0
    return np.concatenate([every.T, np.where(is_out, np.inf, 0.0)[None]])


def _starts(groups: list[tuple[int, ...]]) -> Indices:
    return np.cumsum([0, *map(len, groups)], dtype=np.intp)


def _joined(groups: list[tuple[int, ...]]) -> Indices:
    return np.array([each for group in groups for each in group], dtype=np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class TableViews:
    """Tables that lie one after the other in `columns` (weights, cells), from offsets[t] on: each with an
    axis for each of its variables and one for the weights."""

    order: EliminationOrder
    sizes: tuple[int, ...]
    offsets: Indices
    columns: Values

    def __getitem__(self, table: int) -> Values:
        sizes = tuple(self.sizes[variable] for variable in self.order.variables_of(table))
        start = int(self.offsets[table])
        own = self.columns[:, start : start + prod(sizes)].reshape((-1, *sizes))
        return own.transpose((*range(1, own.ndim), 0))


@dataclass(slots=True, eq=False)
class FlatSums:
    """The tables of a part one after the other: cell c of table t is column offsets[t] + c of `sums`
    (weights, cells); what is alike has the columns of the `first` of it. `places` and `outside` are that of
    what is not in a table."""

    part: FactorGraph
    order: EliminationOrder
    sizes: Indices
    first: Indices
    offsets: Indices
    sums: Values
    places: Indices
    outside: Values

    @staticmethod
    def of(
        part: FactorGraph,
        order: EliminationOrder,
        first: Mapping[int, int],
        weights: Values,
        peak_shares: PeakShares,
    ) -> FlatSums:
        """Of weights (J, 5), the last of which counts where it is `peak_shares`; `first` of each table's
        like."""
        from shardwise.search.tracking.compiled_sums import least_sums, table_sizes, weighted_costs

        sizes, program = np.array(part.sizes, dtype=np.intp), program_of(order)
        cells = table_sizes(program, sizes)
        firsts = np.array([first[table] for table in range(len(cells))], dtype=np.intp)
        count = len(part.factors)
        is_made = firsts[count:] == np.arange(count, len(cells))
        given = np.cumsum([0, *cells[:count]], dtype=np.intp)
        offsets = np.concatenate([given[:-1], given[-1] + np.cumsum([0, *(cells[count:] * is_made)])[:-1]])
        sums = np.empty((len(weights), int(given[-1] + (cells[count:] * is_made).sum())))
        costs = costs_of(part)
        weighted_costs(costs, np.ascontiguousarray(weights), sums)
        for factor, share in peak_shares:
            own = slice(int(given[factor]), int(given[factor + 1]))
            sums[:, own] += weights[:, 4:] * (share * costs[4, own])
        offsets = offsets[firsts]
        least_sums(program, sizes, firsts, offsets, sums)
        places = np.cumsum([0, *cells], dtype=np.intp)
        return FlatSums(part, order, sizes, firsts, offsets, sums, places, np.empty((len(weights), 0)))

    @property
    def tables(self) -> TableViews:
        """Each table."""
        return TableViews(self.order, self.part.sizes, self.offsets, self.sums)

    def distribute(self, outside: Values) -> TableViews:
        """What is least outside of each table, given that of the last."""
        from shardwise.search.tracking.compiled_sums import sums_outside

        self.outside = np.empty((len(self.sums), int(self.places[-1])))
        found = TableViews(self.order, self.part.sizes, self.places, self.outside)
        found[self.order.last][:] = outside
        sums_outside(program_of(self.order), self.sizes, self.offsets, self.sums, self.places, self.outside)
        return found

    def potentials(self, outside: Values) -> TableViews:
        """What a label of each table adds to the excess of the whole beside its own sum, under the first
        weights, given that of the last table."""
        from shardwise.search.tracking.compiled_sums import potential_sums

        found = TableViews(self.order, self.part.sizes, self.places, np.empty((1, int(self.places[-1]))))
        found[self.order.last][:] = outside
        potential_sums(
            program_of(self.order), self.sizes, self.offsets, self.sums, self.places, found.columns
        )
        return found

    def min_marginals(self) -> list[Values]:
        """Of each variable the totals that no solution with a choice of it is below, (choices, weights)."""
        from shardwise.search.tracking.compiled_sums import min_marginal_sums

        start, found = min_marginal_sums(
            program_of(self.order), self.sizes, self.offsets, self.sums, self.places, self.outside
        )
        return [found[:, start[variable] : start[variable + 1]].T for variable in range(len(self.sizes))]

    def choices(self, fixed: Mapping[int, Indices]) -> dict[int, Indices]:
        """Choices of all variables that reach the least sums, one per weight, given those of the ends."""
        from shardwise.search.tracking.compiled_sums import least_choices

        chosen = np.zeros((len(self.sizes), len(self.sums)), dtype=np.intp)
        for variable, own in fixed.items():
            chosen[variable] = own
        least_choices(program_of(self.order), self.sizes, self.offsets, self.sums, chosen)
        return dict(enumerate(chosen))
