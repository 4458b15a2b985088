"""The labels of a part in one array, made by machine code in one go."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.flat import FlatSums, PeakShares, costs_of, program_of
from shardwise.search.tracking.grid import EpsilonDominance
from shardwise.search.tracking.labels import (
    LABELS_PER_CELL,
    MOST_LABELS_IF_EXACT,
    MOST_LABELS_WITH_TOLERANCE,
    MOST_PAIRS_IF_EXACT,
    MOST_PAIRS_WITH_TOLERANCE,
    Labels,
    TooManyLabels,
    labels_of,
)
from shardwise.search.tracking.likes import EqualTables
from shardwise.search.tracking.lines import SLACK
from shardwise.search.tracking.scalars import FactorSums
from shardwise.search.tracking.steps import EliminationOrder

if TYPE_CHECKING:
    from shardwise.search.tracking.compiled_parts import EliminatedTables, ToleranceArrays

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


_NEVER = int(np.iinfo(np.intp).max)
"""More pairs than there are."""


@lru_cache(maxsize=256)
def is_plain(order: EliminationOrder) -> bool:
    """Whether each step makes a table on just the variables that it meets."""
    for step in order.steps:
        met = {variable for table in step.inputs for variable in order.variables_of(table)}
        if met - {step.variable} != set(step.variables):
            return False
    return True


@lru_cache(maxsize=256)
def _factors_in(order: EliminationOrder) -> list[frozenset[int]]:
    """The factors that each table is made of."""
    found = [frozenset([place]) for place in range(len(order.factors))]
    for step in order.steps:
        found.append(frozenset().union(*(found[table] for table in step.inputs)))
    return found


@lru_cache(maxsize=1024)
def _counts_and_shares(order: EliminationOrder, peak_shares: PeakShares) -> tuple[Indices, Values]:
    """How many factors are in each table, and which part of the peak's weight is weighed there."""
    every = _factors_in(order)
    shares = [sum(share for factor, share in peak_shares if factor in own) for own in every]
    return np.array([len(own) for own in every], dtype=np.intp), np.array(shares, dtype=np.float64)


def eliminated_by_numba(
    factor_sums: FactorSums,
    flat: FlatSums,
    limit: float,
    dominance: EpsilonDominance | None,
    tolerance_from_pairs: int,
) -> Labels:
    """The labels of a part's last table, of sums that lie `flat`, after `spread`: those whose weighted sums
    with what is outside are below the limit. Steps of `tolerance_from_pairs` pairs or more lose what the grid
    allows, whose potential is that of the last table. TooManyLabels where there are."""
    from shardwise.search.tracking.compiled_parts import (
        FactorGraphArrays,
        JoinLimits,
        OutsideSums,
        eliminated_labels,
    )

    order = flat.order
    counts, shares = _counts_and_shares(order, factor_sums.peak_shares)
    made = eliminated_labels(
        FactorGraphArrays(program_of(order), flat.sizes, costs_of(flat.part), flat.first, counts, shares),
        OutsideSums(
            np.ascontiguousarray(factor_sums.weights), limit * (1.0 + SLACK), flat.places, flat.outside
        ),
        _tolerance_arrays(flat, dominance, tolerance_from_pairs),
        JoinLimits(MOST_PAIRS_IF_EXACT, MOST_LABELS_IF_EXACT, LABELS_PER_CELL),
    )
    if not made.is_done:
        raise TooManyLabels
    return _Tables(flat, EqualTables.of(factor_sums), made).labels(order.last)


def _tolerance_arrays(
    flat: FlatSums, dominance: EpsilonDominance | None, tolerance_from_pairs: int
) -> ToleranceArrays:
    """What may be lost, as loops take it."""
    from shardwise.search.tracking.compiled_parts import ToleranceArrays

    if dominance is None:
        none = np.zeros(5)
        return ToleranceArrays(
            none, none, np.zeros((1, 0)), _NEVER, MOST_PAIRS_WITH_TOLERANCE, MOST_LABELS_WITH_TOLERANCE
        )
    outside = dominance.potential.reshape(
        (*(flat.part.sizes[variable] for variable in flat.part.separator), 1)
    )
    return ToleranceArrays(
        unfolded_tolerance(dominance.base), unfolded_tolerance(dominance.rate),
        flat.potentials(outside).columns, tolerance_from_pairs, MOST_PAIRS_WITH_TOLERANCE,
        MOST_LABELS_WITH_TOLERANCE,
    )  # fmt: skip


def unfolded_tolerance(tolerance: Values) -> Values:
    """What may be lost in the columns before they are folded: a peak is what is made again and a temporary
    beside it, half and half."""
    return np.asarray([*tolerance[:3], tolerance[3] / 2.0, tolerance[3] / 2.0])


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """What machine code made of a part, table by table."""

    flat: FlatSums
    equal_tables: EqualTables
    made: EliminatedTables
    known: dict[int, Labels] = field(default_factory=dict)

    def labels(self, table: int) -> Labels:
        """The labels of a table, with those that it was made of."""
        if table not in self.known:
            self.known[table] = self._labels(table)
        return self.known[table]

    def _labels(self, table: int) -> Labels:
        order, made = self.flat.order, self.made
        given = len(order.factors)
        if given <= table < given + len(order.steps) and self.equal_tables.first(table) != table:
            return self.equal_tables.renamed(self.labels(self.equal_tables.first(table)), table)
        rows = slice(int(made.start[table]), int(made.stop[table]))
        origins = tuple(
            (self.labels(origin) if origin >= 0 else _NOTHING, made.rows[side, rows])
            for side, origin in enumerate(made.tables[:, table].tolist() if table >= given else ())
        )
        if table < given + len(order.steps):
            variables = order.variables_of(table)
        else:
            variables = tuple(sorted({each for origin, _ in origins for each in origin.variables}))
        sizes = tuple(self.flat.part.sizes[variable] for variable in variables)
        return Labels(variables, sizes, made.cells[rows], made.points[rows], origins)


_NOTHING = labels_of((), np.zeros((5,)))
"""One label that costs nothing, on no variable."""
