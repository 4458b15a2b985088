"""Joins of labels and epsilon-dominance in NumPy, pair by pair: what compiled loops are compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.pareto import FactorGraph, non_dominated
from shardwise.search.pareto.dominance import EpsilonDominance
from shardwise.search.pareto.labels import LabelPruning, Labels

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


def joined(a: Labels, b: Labels, without: int | None, pruning: LabelPruning | None) -> tuple[Indices, Values]:
    """The cells and costs of the non-dominated pairs of each cell, cells ascending, then by cost."""
    cells, points = pairs_of(a, b, without, pruning)
    best = non_dominated(points, groups=cells)
    best = best[np.lexsort((*points[best].T[::-1], cells[best]))]
    return cells[best], points[best]


def pairs_of(
    a: Labels, b: Labels, without: int | None, pruning: LabelPruning | None
) -> tuple[Indices, Values]:
    """The cells and costs of all pairs that agree in their common variables and pass the pruning."""
    own, other = a.coordinates(), b.coordinates()
    agrees = np.ones((len(a), len(b)), dtype=bool)
    for variable in own.keys() & other.keys():
        agrees &= own[variable][:, None] == other[variable][None]
    rows_a, rows_b = np.nonzero(agrees)
    size_of = dict(zip((*a.variables, *b.variables), (*a.sizes, *b.sizes), strict=True))
    left = sorted(size_of.keys() - {without})
    cells = np.zeros(len(rows_a), dtype=np.intp)
    for variable in left:
        choice = own[variable][rows_a] if variable in own else other[variable][rows_b]
        cells = cells * size_of[variable] + choice
    points = a.points[rows_a] + b.points[rows_b]
    points[:, -1] = np.maximum(a.points[rows_a, -1], b.points[rows_b, -1])
    if pruning is None:
        return cells, points
    if pruning.peaks is not None:
        points[:, -1] = np.maximum(points[:, -1], pruning.peaks.reshape(-1)[cells])
    outside = pruning.outside.reshape((-1, pruning.weights.shape[1]))
    is_needed = (points @ pruning.weights + outside[cells] < pruning.padded_limit).all(axis=1)
    return cells[is_needed], points[is_needed]


def reduced(cells: Indices, points: Values, ranks: Values, dominance: EpsilonDominance) -> Indices:
    """The labels of one table that stay, grid by grid from the finest: of labels on the same grid point the
    one of least rank. A label on a finer grid is never dropped for one on a coarser grid.
    """
    ranges = grids_of(cells, points, dominance)
    undominated = np.empty(0, dtype=np.intp)
    for grid in range(int(ranges.max(initial=0)) + 1):
        rows = np.concatenate([undominated, np.flatnonzero(ranges == grid)])
        rows = rows[np.argsort(ranks[rows], kind="stable")]
        floors = np.floor(points[rows] / (dominance.base * 2.0**grid))
        best = rows[non_dominated(floors, groups=cells[rows])]
        undominated = np.concatenate([undominated, best[ranges[best] == grid]])
    return undominated[np.argsort(cells[undominated], kind="stable")]


def grids_of(cells: Indices, points: Values, dominance: EpsilonDominance) -> Indices:
    """The grid of each label: 0 up to twice the base tolerance, then one more for each doubling."""
    excess = np.maximum(points @ dominance.weights + dominance.potential[cells], 0.0)
    return np.asarray(np.frexp(1.0 + dominance.growth * excess)[1], dtype=np.intp) - 1


def labels_by_definition(
    part: FactorGraph, weights: Values, limit: float
) -> dict[tuple[int, ...], set[tuple[float, ...]]]:
    """For each choice of the separator the non-dominated costs of all choices of the other variables, if
    their sum is below the limit under all weights (J, 5).
    """
    choices = np.indices(part.sizes).reshape(len(part.sizes), -1)
    points = np.zeros((choices.shape[1], 5))
    for factor in part.factors:
        own = factor.costs[tuple(choices[variable] for variable in factor.variables)]
        points[:, :4] += own[:, :4]
        points[:, 4] = np.maximum(points[:, 4], own[:, 4])
    is_left = np.asarray(np.isfinite(points).all(axis=1))
    is_left[is_left] = (points[is_left] @ weights.T < limit).all(axis=1)
    at, points = choices[list(part.separator)].T[is_left], points[is_left]
    cells = np.unique(at, axis=0, return_inverse=True)[1].reshape(-1)
    found: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
    for row in non_dominated(points, groups=cells).tolist():
        found.setdefault(tuple(at[row].tolist()), set()).add(tuple(points[row].round(9).tolist()))
    return found
