"""Epsilon-dominance of labels: how much more a label that stands for another may cost, and which labels stay.

`reduced` keeps the non-dominated labels of each cell up to an `EpsilonDominance`. `undominated_in_bins` is a
fast filter for very many labels on a grid, without sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.pareto import non_dominated
from shardwise.search.pareto import numba_dispatch, tuning

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class EpsilonDominance:
    """Tolerance of one table: how much more than a label, column by column, another one that stands for it
    may cost. It is `base` (columns) plus `rate` (columns) per unit of the label's excess.

    The excess of a label is what it adds to the least weighted sum of the whole (its reduced cost): its own
    sum under `weights` (columns) plus the `potential` of its cell. Along a chain, excesses add up to that of
    the solution, which the limit of an enumeration bounds. So labels of which a solution can contain only few
    are on a coarser grid, without more tolerance in total.
    """

    base: Values
    rate: Values
    weights: Values
    potential: Values

    @staticmethod
    def even(steps: Values) -> EpsilonDominance:
        """The same tolerance for every label."""
        return EpsilonDominance(steps, np.zeros(len(steps)), np.zeros(len(steps)), np.zeros(1))

    @property
    def growth(self) -> float:
        """Tolerance in addition to the base per unit of excess, in multiples of the base; the smallest over
        all columns."""
        is_some = self.rate > 0.0
        return float((self.rate[is_some] / self.base[is_some]).min()) if is_some.any() else 0.0

    def ranges(self, cells: Indices, points: Values) -> Indices:
        """The grid of each label: 0 up to twice the base tolerance, then one more for each doubling."""
        rate = self.growth
        if rate == 0.0:
            return np.zeros(len(cells), dtype=np.intp)
        excess = np.maximum(points @ self.weights + self.potential[cells], 0.0)
        return np.asarray(np.frexp(1.0 + rate * excess)[1], dtype=np.intp) - 1

    def steps(self, place: int) -> Values:
        """The steps of a grid (columns). Each grid has twice the steps of the one before, so a label that
        stands for another on the finer grid does so on the coarser one."""
        return np.asarray(self.base * 2.0**place)


def reduced(cells: Indices, points: Values, ranks: Values, dominance: EpsilonDominance | None) -> Indices:
    """The rows of labels that no other label of their cell dominates.

    With a `dominance`, each label that is dropped is matched by one that costs at most a step more in any
    column. Of labels on the same grid point the one of least rank stays.
    """
    if dominance is None:
        return non_dominated(points, groups=cells)
    if numba_dispatch.uses_numba(len(cells)):
        return numba_dispatch.undominated(cells, points, ranks, dominance)
    ranges = dominance.ranges(cells, points)
    undominated = np.empty(0, dtype=np.intp)
    for place in range(int(ranges.max(initial=0)) + 1):
        # Labels that survive on finer grids may dominate labels on this grid. They are never dropped here.
        fresh = np.flatnonzero(ranges == place)
        if not len(fresh):
            continue
        rows = np.concatenate([undominated, fresh])
        rows = rows[np.argsort(ranks[rows], kind="stable")]
        best = rows[non_dominated(_stepped(points[rows], dominance.steps(place)), groups=cells[rows])]
        undominated = np.concatenate([undominated, best[ranges[best] == place]])
    return undominated[np.argsort(cells[undominated], kind="stable")]


def _stepped(points: Values, steps: Values) -> Values:
    is_coarse = steps > 0.0
    found = points.copy()
    found[:, is_coarse] = np.floor(points[:, is_coarse] / steps[is_coarse])
    return found


Steps = npt.NDArray[np.float64]

MOST_BINS = 1 << 24
"""Most bins in memory at a time."""

WIDEST = 1 << 22
"""Most steps between the least and the largest value of a column."""


def undominated_in_bins(cells: Indices, steps: list[Steps]) -> Indices:
    """Rows that no other row of their cell dominates: all of these, and possibly rows that others equal.

    `steps` are columns of whole numbers. Rows are sorted into bins by cell and by all columns but the first.
    The least value of the first column in each bin is propagated to all bins that are no less in each column.
    Returns all rows if there would be too many bins, or if there are more than four columns.
    """
    every = np.arange(len(cells), dtype=np.intp)
    if len(cells) < tuning.TUNING.bins_from_rows or not 1 < len(steps) <= 4:
        return every
    classes = [_classes(column) for column in (cells, *steps[1:])]
    found = [each for each in classes if each is not None]
    sizes = tuple(size for _, size in found)
    most = min(MOST_BINS, tuning.TUNING.most_bins_per_row * len(cells))
    if len(found) < len(classes) or np.prod(sizes, dtype=np.float64) > most:
        return every
    at = np.ravel_multi_index(tuple(own for own, _ in found), sizes)
    least = np.full(int(np.prod(sizes)), np.inf)
    np.minimum.at(least, at, steps[0])
    table = least.reshape(sizes)
    carried = table
    for axis in range(1, len(sizes)):
        carried = np.minimum.accumulate(carried, axis=axis)
    for axis in range(1, len(sizes)):
        inner = tuple(slice(1, None) if own == axis else slice(None) for own in range(len(sizes)))
        outer = tuple(slice(None, -1) if own == axis else slice(None) for own in range(len(sizes)))
        table[inner] = np.where(table[inner] < carried[outer], table[inner], -np.inf)
    return np.asarray(every[steps[0] == least[at]])


def _classes(column: npt.NDArray[Any]) -> tuple[Indices, int] | None:
    """The rank of each value among those that occur, and how many occur; None if the values are too far
    apart."""
    low, high = column.min(), column.max()
    if high - low >= WIDEST:
        return None
    own = (column - low).astype(np.intp)
    is_seen = np.zeros(int(high - low) + 1, dtype=bool)
    is_seen[own] = True
    ranks = np.cumsum(is_seen) - 1
    return ranks[own], int(ranks[-1]) + 1
