"""Epsilon-dominance of labels: how much more a label that stands for another may cost, and which labels stay.

`reduced` keeps the non-dominated labels of each cell up to an `EpsilonDominance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.pareto import non_dominated

if TYPE_CHECKING:
    from shardwise.search.pareto.joins_numba import DominanceArrays

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


def reduced(cells: Indices, points: Values, ranks: Values, dominance: EpsilonDominance | None) -> Indices:
    """The rows of labels that no other label of their cell dominates.

    With a `dominance`, each label that is dropped is matched by one that costs at most a step more in any
    column. Of labels on the same grid point the one of least rank stays.
    """
    if dominance is None:
        return non_dominated(points, groups=cells)
    from shardwise.search.pareto.joins_numba import PruningArrays, Side
    from shardwise.search.pareto.labels_numba import joined_sides

    # In order of rank, so that the label of least rank stays.
    order = np.lexsort((ranks, cells))
    count, width = int(cells.max(initial=-1)) + 1, points.shape[1]
    own = Side(
        np.ascontiguousarray(points[order]), np.zeros(len(order)),
        np.searchsorted(cells[order], np.arange(count + 1)), np.arange(count, dtype=np.intp), 0,
    )  # fmt: skip
    nothing = Side(
        np.zeros((1, width)), np.zeros(1), np.array([0, 1], dtype=np.intp), np.zeros(count, dtype=np.intp), 0
    )
    pruning = PruningArrays(np.zeros((0, width)), np.zeros((count, 0)), np.inf, np.full(count, -np.inf))
    differs = (points != points[:1]).any(axis=0).astype(np.float64)
    _, _, rows, _ = joined_sides(
        (own, differs, order), (nothing, np.zeros(width), np.zeros(1, dtype=np.intp)), 1, pruning,
        dominance_arrays(dominance, count, width), len(order) + 1, len(order) + 1,
    )  # fmt: skip
    return np.asarray(rows[0])


def dominance_arrays(dominance: EpsilonDominance | None, cells: int, width: int) -> DominanceArrays:
    """Epsilon-dominance of a table of `cells` and `width` columns, for compiled loops."""
    from shardwise.search.pareto.joins_numba import DominanceArrays

    if dominance is None:
        return DominanceArrays(np.zeros(width), 0.0, np.zeros(width), np.zeros(cells))
    potential = np.array(np.broadcast_to(dominance.potential, (max(cells, len(dominance.potential)),)))
    return DominanceArrays(np.array(dominance.base), dominance.growth, np.array(dominance.weights), potential)
