"""When joins and sums run in compiled loops (numba), and the tables as arrays for these loops.

Without a tolerance the result is the same with and without numba. With one, another of several equivalent
labels may stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto import tuning

if TYPE_CHECKING:
    from shardwise.search.pareto.dominance import EpsilonDominance
    from shardwise.search.pareto.joins_numba import DominanceArrays, PreparedSide, PruningArrays, Side
    from shardwise.search.pareto.labels import LabelPruning, Labels, TerminalJoin


Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@cache
def is_installed() -> bool:
    """Whether numba is installed (`pip install 'shardwise[fast]'`)."""
    return find_spec("numba") is not None


def uses_numba(pairs: int) -> bool:
    """Whether a join of at most so many pairs of labels runs in compiled loops. With a tolerance, other
    equivalent labels may stay than in numpy; without one they are the same."""
    return pairs >= tuning.TUNING.numba_from_pairs and is_installed()


def uses_numba_for_sums(costs: int) -> bool:
    """Whether the weighted sums of a factor graph with so many costs run in compiled loops."""
    return costs >= tuning.TUNING.numba_from_costs and is_installed()


JoinedLabels = tuple[Indices, Indices, Indices, Values]
"""Labels that stay, by ascending cell: their rows in both tables, their cells and their costs."""


class TableArrays(NamedTuple):
    """A table as given: the costs of its labels by ascending cell, the weights of its columns, the number of
    choices of each variable, and the axis of the joint cells that it is (-1 if it is eliminated)."""

    points: Values
    cells: Indices
    weights: Values
    sizes: Indices
    axes: Indices


@dataclass(frozen=True, slots=True, eq=False)
class NumbaJoin:
    """A join of two tables on the cells of `left` (variables, of `sizes`), with `without` eliminated."""

    a: Labels
    b: Labels
    left: tuple[int, ...]
    sizes: tuple[int, ...]
    without: int | None
    pruning: LabelPruning | None

    def count(self, enough: int) -> int:
        """The number of pairs of labels to compare, at most `enough`."""
        from shardwise.search.pareto.joins_numba import number_of_pairs

        (a, _), (b, _) = self._sides()
        return number_of_pairs(a, b, self._choices, self._pruning_arrays, enough)

    def labels(
        self, dominance: EpsilonDominance | None, most_pairs: int, most_labels: int
    ) -> JoinedLabels | None:
        """The labels that stay; None if a limit is exceeded."""
        from shardwise.search.pareto.labels_numba import joined_sides

        a, b = self._prepared_sides()
        arrays = _dominance_arrays(dominance, prod(self.sizes), self.a.points.shape[1])
        count, rows, points = joined_sides(
            a, b, self._choices, self._pruning_arrays, arrays, most_pairs, most_labels
        )
        return None if count < 0 else (rows[0, :count], rows[1, :count], rows[2, :count], points)

    def terminal(self, terminal: TerminalJoin, most_pairs: int) -> JoinedLabels | None:
        """The terminal join: labels compared by seconds and bytes, in any cell."""
        from shardwise.search.pareto.joins_numba import terminal_pairs

        slack = np.zeros(2) if terminal.slack is None else terminal.slack
        (a, order_a), (b, order_b) = self._sides()
        arrays = self._pruning_arrays
        count, rows = terminal_pairs(a, b, self._choices, arrays, slack, most_pairs)
        if count < 0:
            return None
        rows_a, rows_b, cells = order_a[rows[0, :count]], order_b[rows[1, :count]], rows[2, :count]
        points = self.a.points[rows_a] + self.b.points[rows_b]
        points[:, -1] = np.maximum(self.a.points[rows_a, -1], self.b.points[rows_b, -1])
        points[:, -1] = np.maximum(points[:, -1], arrays.peaks[cells])
        return rows_a, rows_b, cells, points

    @property
    def _choices(self) -> int:
        """Number of choices of the eliminated variable."""
        for table in (self.a, self.b):
            if self.without in table.variables:
                return table.sizes[table.variables.index(self.without)]
        return 1

    @property
    def _pruning_arrays(self) -> PruningArrays:
        return _pruning_arrays(self.pruning, prod(self.sizes), self.a.points.shape[1])

    def _tables(self) -> tuple[TableArrays, TableArrays]:
        nothing = np.zeros(self.a.points.shape[1])
        pruning = self.pruning
        weights = (
            (nothing, nothing) if pruning is None else (pruning.weights_a[:, 0], pruning.weights_b[:, 0])
        )
        return self._table(self.a, weights[0]), self._table(self.b, weights[1])

    def _table(self, table: Labels, weights: Values) -> TableArrays:

        axes = [self.left.index(v) if v != self.without else -1 for v in table.variables]
        return TableArrays(
            np.ascontiguousarray(table.points), table.cells, np.ascontiguousarray(weights),
            np.array(table.sizes, dtype=np.intp), np.array(axes, dtype=np.intp),
        )  # fmt: skip

    def _sides(self) -> list[tuple[Side, Indices]]:
        """Both tables prepared for the loops, and the order of their rows."""
        return [(side, order) for side, _, order in self._prepared_sides()]

    def _prepared_sides(self) -> tuple[PreparedSide, PreparedSide]:
        """Both tables prepared for the loops, with the columns in which their labels differ."""
        from shardwise.search.pareto.joins_numba import side_of

        left = np.array(self.sizes, dtype=np.intp)
        one, other = self._tables()
        return side_of(*one, left), side_of(*other, left)


def undominated(cells: Indices, points: Values, ranks: Values, dominance: EpsilonDominance) -> Indices:
    """The labels of one table that stay, cell by cell: as `dominance.reduced`."""
    from shardwise.search.pareto.joins_numba import PruningArrays, Side
    from shardwise.search.pareto.labels_numba import labels_of_pairs

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
    # In order of rank, so that the label of least rank stays.
    arrays = PruningArrays(np.zeros((0, width)), np.zeros((count, 0)), np.inf, np.full(count, -np.inf))
    columns = np.flatnonzero((points != points[:1]).any(axis=0))
    left, rows = labels_of_pairs(
        own,
        nothing,
        1,
        arrays,
        _dominance_arrays(dominance, count, width),
        columns,
        len(order) + 1,
        len(order) + 1,
    )
    return np.asarray(order[rows[0, :left]])


def _pruning_arrays(pruning: LabelPruning | None, cells: int, width: int) -> PruningArrays:
    from shardwise.search.pareto.joins_numba import PruningArrays

    if pruning is None:
        return PruningArrays(np.zeros((0, width)), np.zeros((cells, 0)), np.inf, np.full(cells, -np.inf))
    multipliers = pruning.weights.shape[1]
    peaks = np.full(cells, -np.inf) if pruning.peaks is None else np.array(pruning.peaks).reshape(-1)
    return PruningArrays(
        np.array(pruning.weights.T, order="C"),
        np.array(pruning.outside, order="C").reshape((-1, multipliers)),
        float(pruning.padded_limit), peaks,
    )  # fmt: skip


def _dominance_arrays(dominance: EpsilonDominance | None, cells: int, width: int) -> DominanceArrays:
    from shardwise.search.pareto.joins_numba import DominanceArrays

    if dominance is None:
        return DominanceArrays(np.zeros(width), 0.0, np.zeros(width), np.zeros(cells))
    potential = np.array(np.broadcast_to(dominance.potential, (max(cells, len(dominance.potential)),)))
    return DominanceArrays(np.array(dominance.base), dominance.growth, np.array(dominance.weights), potential)
