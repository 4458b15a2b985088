"""When loops over pairs of labels are run as machine code, and the tables as these take them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # numba takes half a second to be read
    from shardwise.search.tracking.compiled import Loss, Reach, Side, Sided
    from shardwise.search.tracking.grid import Grid
    from shardwise.search.tracking.labels import Ends, Labels, Within

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

PAYS_FROM = 1024
"""Pairs of labels, at most, of a join from which on machine code is worth its start."""


SUMS_PAY_FROM = 2048
"""Costs of a part from which on its weighted sums are."""


@cache
def is_installed() -> bool:
    """Whether numba is there (`pip install 'shardwise[fast]'`)."""
    return find_spec("numba") is not None


def pays(pairs: int) -> bool:
    """Whether a join of at most so many pairs is run as machine code. Labels that stand for each other up to
    a loss may be others than without it; without a loss they are the same."""
    return pairs >= PAYS_FROM and is_installed()


def pays_for_sums(costs: int) -> bool:
    """Whether the weighted sums of a part of so many costs are worked out by machine code."""
    return costs >= SUMS_PAY_FROM and is_installed()


Joined = tuple[Indices, Indices, Indices, Values]
"""Of labels that stay, by ascending cells: their rows in both tables, their cells and what they cost."""


class Table(NamedTuple):
    """A table as it is: what its labels cost, by ascending cells; what its columns weigh; how many choices
    each of its variables has, and which axis of the joint cells it is (-1 where it is taken out)."""

    points: Values
    cells: Indices
    weights: Values
    sizes: Indices
    axes: Indices


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Two tables that meet in the cells of `left` (variables, of `sizes`), `without` taken out."""

    a: Labels
    b: Labels
    left: tuple[int, ...]
    sizes: tuple[int, ...]
    without: int | None
    within: Within | None

    def count(self, enough: int) -> int:
        """How many pairs there are to look at, or enough."""
        from shardwise.search.tracking.compiled import number_of_pairs

        (a, _), (b, _) = self._sides()
        return number_of_pairs(a, b, self._choices, self._reach, enough)

    def labels(self, grid: Grid | None, most_pairs: int, most_labels: int) -> Joined | None:
        """The labels that stay; None if too many."""
        from shardwise.search.tracking.compiled_labels import joined_sides

        a, b = self._sided()
        loss = _loss(grid, prod(self.sizes), self.a.points.shape[1])
        count, rows, points = joined_sides(a, b, self._choices, self._reach, loss, most_pairs, most_labels)
        return None if count < 0 else (rows[0, :count], rows[1, :count], rows[2, :count], points)

    def ends(self, ends: Ends, most_pairs: int) -> Joined | None:
        """The same of labels that nothing follows, by seconds and bytes, whatever their cell."""
        from shardwise.search.tracking.compiled import ends_of_pairs

        slack = np.zeros(2) if ends.slack is None else ends.slack
        (a, order_a), (b, order_b) = self._sides()
        reach = self._reach
        count, rows = ends_of_pairs(a, b, self._choices, reach, slack, most_pairs)
        if count < 0:
            return None
        rows_a, rows_b, cells = order_a[rows[0, :count]], order_b[rows[1, :count]], rows[2, :count]
        points = self.a.points[rows_a] + self.b.points[rows_b]
        points[:, -1] = np.maximum(self.a.points[rows_a, -1], self.b.points[rows_b, -1])
        points[:, -1] = np.maximum(points[:, -1], reach.peaks[cells])
        return rows_a, rows_b, cells, points

    @property
    def _choices(self) -> int:
        """How many choices what is taken out has."""
        for table in (self.a, self.b):
            if self.without in table.variables:
                return table.sizes[table.variables.index(self.without)]
        return 1

    @property
    def _reach(self) -> Reach:
        return _reach(self.within, prod(self.sizes), self.a.points.shape[1])

    def _tables(self) -> tuple[Table, Table]:
        nothing = np.zeros(self.a.points.shape[1])
        within = self.within
        weights = (nothing, nothing) if within is None else (within.weights_a[:, 0], within.weights_b[:, 0])
        return self._table(self.a, weights[0]), self._table(self.b, weights[1])

    def _table(self, table: Labels, weights: Values) -> Table:

        axes = [self.left.index(v) if v != self.without else -1 for v in table.variables]
        return Table(
            np.ascontiguousarray(table.points), table.cells, np.ascontiguousarray(weights),
            np.array(table.sizes, dtype=np.intp), np.array(axes, dtype=np.intp),
        )  # fmt: skip

    def _sides(self) -> list[tuple[Side, Indices]]:
        """Both tables as loops take them, and the rows of each in that order."""
        return [(side, order) for side, _, order in self._sided()]

    def _sided(self) -> tuple[Sided, Sided]:
        """The same with the columns in which the labels of each differ."""
        from shardwise.search.tracking.compiled import side_of

        left = np.array(self.sizes, dtype=np.intp)
        one, other = self._tables()
        return side_of(*one, left), side_of(*other, left)


def kept(cells: Indices, points: Values, ranks: Values, grid: Grid) -> Indices:
    """The labels that stay of one table, cell by cell: as `grid.reduced`."""
    from shardwise.search.tracking.compiled import Reach, Side
    from shardwise.search.tracking.compiled_labels import labels_of_pairs

    order = np.lexsort((ranks, cells))
    count, width = int(cells.max(initial=-1)) + 1, points.shape[1]
    every = np.arange(count, dtype=np.intp)
    own = Side(
        np.ascontiguousarray(points[order]), np.zeros(len(order)),
        np.searchsorted(cells[order], np.arange(count + 1)), every, 0,
    )  # fmt: skip
    nothing = Side(
        np.zeros((1, width)), np.zeros(1), np.array([0, 1], dtype=np.intp), np.zeros(count, dtype=np.intp), 0
    )
    # In order of rank, so that of like labels the one of least rank stays.
    reach = Reach(np.zeros((0, width)), np.zeros((count, 0)), np.inf, np.full(count, -np.inf))
    columns = np.flatnonzero((points != points[:1]).any(axis=0))
    left, rows = labels_of_pairs(
        own, nothing, 1, reach, _loss(grid, count, width), columns, len(order) + 1, len(order) + 1
    )
    return np.asarray(order[rows[0, :left]])


def _reach(within: Within | None, cells: int, width: int) -> Reach:
    from shardwise.search.tracking.compiled import Reach

    if within is None:
        return Reach(np.zeros((0, width)), np.zeros((cells, 0)), np.inf, np.full(cells, -np.inf))
    forms = within.weights.shape[1]
    peaks = np.full(cells, -np.inf) if within.peaks is None else np.array(within.peaks).reshape(-1)
    return Reach(
        np.array(within.weights.T, order="C"), np.array(within.outside, order="C").reshape((-1, forms)),
        float(within.reach), peaks,
    )  # fmt: skip


def _loss(grid: Grid | None, cells: int, width: int) -> Loss:
    from shardwise.search.tracking.compiled import Loss

    if grid is None:
        return Loss(np.zeros(width), 0.0, np.zeros(width), np.zeros(cells))
    potential = np.array(np.broadcast_to(grid.potential, (max(cells, len(grid.potential)),)))
    return Loss(np.array(grid.base), grid.growth, np.array(grid.weights), potential)
