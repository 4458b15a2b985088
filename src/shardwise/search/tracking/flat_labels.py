"""The labels of a part in one array, made by machine code in one go."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.flat import Flat, Peaked, costs_of, program_of
from shardwise.search.tracking.grid import Grid
from shardwise.search.tracking.labels import (
    CLOSE_LABELS,
    CLOSE_PAIRS,
    LABELS_PER_CELL,
    MOST_LABELS,
    MOST_PAIRS,
    Labels,
    TooManyLabels,
    labels_of,
)
from shardwise.search.tracking.likes import Likes
from shardwise.search.tracking.lines import SLACK
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.steps import Order

if TYPE_CHECKING:
    from shardwise.search.tracking.compiled_parts import Losing, Made

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


_NEVER = int(np.iinfo(np.intp).max)
"""More pairs than there are."""


@lru_cache(maxsize=256)
def is_plain(order: Order) -> bool:
    """Whether each step makes a table on just the variables that it meets."""
    for step in order.steps:
        met = {variable for table in step.inputs for variable in order.variables_of(table)}
        if met - {step.variable} != set(step.variables):
            return False
    return True


@lru_cache(maxsize=256)
def _factors_in(order: Order) -> list[frozenset[int]]:
    """The factors that each table is made of."""
    found = [frozenset([place]) for place in range(len(order.factors))]
    for step in order.steps:
        found.append(frozenset().union(*(found[table] for table in step.inputs)))
    return found


@lru_cache(maxsize=1024)
def _counts_and_shares(order: Order, peaked: Peaked) -> tuple[Indices, Values]:
    """How many factors are in each table, and which part of the peak's weight is weighed there."""
    every = _factors_in(order)
    shares = [sum(share for factor, share in peaked if factor in own) for own in every]
    return np.array([len(own) for own in every], dtype=np.intp), np.array(shares, dtype=np.float64)


def eliminated_at_once(scalars: Scalars, flat: Flat, limit: float, grid: Grid | None, many: int) -> Labels:
    """The labels of a part's last table, of sums that lie `flat`, after `spread`: those whose weighted sums
    with what is outside are below the limit. Steps of `many` pairs or more lose what the grid allows, whose
    potential is that of the last table. TooManyLabels where there are."""
    from shardwise.search.tracking.compiled_parts import Given, Most, Wanted, eliminated_labels

    order = flat.order
    counts, shares = _counts_and_shares(order, scalars.peaked)
    made = eliminated_labels(
        Given(program_of(order), flat.sizes, costs_of(flat.part), flat.first, counts, shares),
        Wanted(np.ascontiguousarray(scalars.weights), limit * (1.0 + SLACK), flat.places, flat.outside),
        _losing(flat, grid, many),
        Most(MOST_PAIRS, MOST_LABELS, LABELS_PER_CELL),
    )
    if not made.is_done:
        raise TooManyLabels
    return _Tables(flat, Likes.of(scalars), made).labels(order.last)


def _losing(flat: Flat, grid: Grid | None, many: int) -> Losing:
    """What may be lost, as loops take it."""
    from shardwise.search.tracking.compiled_parts import Losing

    if grid is None:
        none = np.zeros(5)
        return Losing(none, none, np.zeros((1, 0)), _NEVER, CLOSE_PAIRS, CLOSE_LABELS)
    outside = grid.potential.reshape((*(flat.part.sizes[variable] for variable in flat.part.kept), 1))
    return Losing(
        unfolded(grid.base), unfolded(grid.rate), flat.potentials(outside).columns, many, CLOSE_PAIRS,
        CLOSE_LABELS,
    )  # fmt: skip


def unfolded(loss: Values) -> Values:
    """What may be lost in the columns before they are folded: a peak is what is made again and a temporary
    beside it, half and half."""
    return np.asarray([*loss[:3], loss[3] / 2.0, loss[3] / 2.0])


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """What machine code made of a part, table by table."""

    flat: Flat
    likes: Likes
    made: Made
    known: dict[int, Labels] = field(default_factory=dict)

    def labels(self, table: int) -> Labels:
        """The labels of a table, with those that it was made of."""
        if table not in self.known:
            self.known[table] = self._labels(table)
        return self.known[table]

    def _labels(self, table: int) -> Labels:
        order, made = self.flat.order, self.made
        given = len(order.factors)
        if given <= table < given + len(order.steps) and self.likes.first(table) != table:
            return self.likes.renamed(self.labels(self.likes.first(table)), table)
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
