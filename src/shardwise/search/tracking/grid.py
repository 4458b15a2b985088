"""Labels that stand for others: how much more they may cost, and which of them stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import non_dominated
from shardwise.search.tracking import machine

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class EpsilonDominance:
    """How much more than a label, column by column, another one may cost that stands for it: `base` (columns)
    and, for each unit of its excess, `rate` (columns).

    The excess of a label is what it adds to the least weighted sum of the whole: its own sum under `weights`
    (columns) and the `potential` of its cell. Along a chain excesses add up to that of the solution, which a
    look bounds; so labels that only few of can be together lie on a coarser grid, and nothing more is lost.
    """

    base: Values
    rate: Values
    weights: Values
    potential: Values

    @staticmethod
    def even(steps: Values) -> EpsilonDominance:
        """The same for every label."""
        return EpsilonDominance(steps, np.zeros(len(steps)), np.zeros(len(steps)), np.zeros(1))

    @property
    def growth(self) -> float:
        """How much more than the base a label may lose for each unit of its excess, in bases."""
        is_some = self.rate > 0.0
        return float((self.rate[is_some] / self.base[is_some]).min()) if is_some.any() else 0.0

    def ranges(self, cells: Indices, points: Values) -> Indices:
        """The range of what each label may lose: 0 for less than twice the base, then twice as much each."""
        rate = self.growth
        if rate == 0.0:
            return np.zeros(len(cells), dtype=np.intp)
        excess = np.maximum(points @ self.weights + self.potential[cells], 0.0)
        return np.asarray(np.frexp(1.0 + rate * excess)[1], dtype=np.intp) - 1

    def steps(self, place: int) -> Values:
        """The steps of the grid in a range. Each grid is every other step of the one before, so that what
        stands for a label on the finer one does so on the coarser one, one after the other."""
        return np.asarray(self.base * 2.0**place)


def reduced(cells: Indices, points: Values, ranks: Values, dominance: EpsilonDominance | None) -> Indices:
    """The labels that no other one of their cell dominates; with a `dominance`, that none does up to a step
    of it: each that is left out is matched by one that costs at most a step more in any column. Of like ones
    the one of least rank stays."""
    if dominance is None:
        return non_dominated(points, groups=cells)
    if machine.uses_numba(len(cells)):
        return machine.undominated(cells, points, ranks, dominance)
    ranges = dominance.ranges(cells, points)
    undominated = np.empty(0, dtype=np.intp)
    for place in range(int(ranges.max(initial=0)) + 1):
        # On the grid of a range, what stays of those before it stands for labels in it, and stays itself.
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
