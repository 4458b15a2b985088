"""Which points of a set no other point dominates, exactly or up to a relative epsilon; for one set, or for
many (cells) at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import InternalError

Points = npt.NDArray[np.float64]
"""(n, k): n points of k objectives, all minimised."""

Indices = npt.NDArray[np.intp]

_BLOCK = 128
"""Points that are compared with all others at a time, where there are four objectives or more."""


def reduce(points: npt.NDArray[Any], *, cells: Indices | None = None, epsilon: float = 0.0) -> Indices:
    """Indices of the non-dominated rows of `points` (n, k), in lexicographic order of the points.

    Row i is dominated when another row is no larger in every objective and smaller in one; of equal rows the
    first stays. With `cells` (n), rows are compared within their cell only, and come cell by cell. With
    `epsilon` > 0 (two or more objectives of one set) some of these are dropped: for every row p some row q
    stays with q <= (1 + epsilon) p in every objective, and the smallest value of each objective stays
    exactly. Raises InternalError for objectives that are NaN, or that are negative under an epsilon.
    """
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] < 1:
        raise InternalError(f"a frontier has objectives in columns, not an array of shape {points.shape}")
    if np.isnan(points).any():
        raise InternalError("a frontier cannot order NaN")
    if cells is None:
        cells = np.zeros(len(points), dtype=np.intp)
    order = np.lexsort((*points.T[::-1], cells))
    ordered, cell = points[order], cells[order]
    kept = _undominated(ordered, cell)
    if epsilon > 0.0:
        kept = kept[_representatives(ordered[kept], epsilon)]
    return order[kept]


def _undominated(ordered: Points, cell: Indices) -> Indices:
    """Rows that no row before them in their cell matches; rows are in lexicographic order within cells.

    A dominating row comes before the rows it dominates, so each row is first held against the rows before it
    that are best in one objective: which settles nearly all of them, and all where there are two objectives.
    """
    varying = [column for column in ordered.T if (column != column[:1]).any()]
    if not varying:
        return _firsts(cell)
    columns = np.column_stack(varying)
    rows = np.arange(len(columns), dtype=np.intp)
    for _ in range(2):
        left = ~_is_matched_by_best(columns[rows], cell[rows])
        if left.all():
            break
        rows = rows[left]
    if columns.shape[1] <= 2:
        return rows
    if columns.shape[1] == 3:
        return rows[_swept(columns[rows], cell[rows])]
    return rows[_compared(columns[rows], cell[rows])]


def _firsts(cell: Indices) -> Indices:
    """The first row of each cell."""
    is_first = np.ones(len(cell), dtype=bool)
    is_first[1:] = cell[1:] != cell[:-1]
    return np.flatnonzero(is_first)


def _is_matched_by_best(columns: Points, cell: Indices) -> npt.NDArray[np.bool_]:
    """Whether a row is no smaller, in any objective, than the row before it in its cell that is best in one.

    Of the first objective, in which rows are sorted, that is the first row of the cell.
    """
    count, objectives = columns.shape
    starts = np.maximum.accumulate(np.where(_is_start(cell), np.arange(count), 0))
    is_matched = np.zeros(count, dtype=bool)
    for objective in range(1 if objectives > 1 else 0, objectives):
        best = _best_before(columns[:, objective], cell, starts)
        is_later = best < np.arange(count)
        is_matched |= is_later & (columns[best] <= columns).all(axis=1)
    return is_matched


def _is_start(cell: Indices) -> npt.NDArray[np.bool_]:
    is_start = np.ones(len(cell), dtype=bool)
    is_start[1:] = cell[1:] != cell[:-1]
    return is_start


def _best_before(column: npt.NDArray[np.float64], cell: Indices, starts: Indices) -> Indices:
    """For each row the first row before it in its cell with the smallest value, itself where it is the first
    of its cell."""
    count = len(column)
    # Ranks, so that a cell's offset is exact: each cell lies wholly below the one before it.
    _, rank = np.unique(column, return_inverse=True)
    ordinal = np.cumsum(_is_start(cell)) - 1
    key = rank - ordinal * (int(rank.max(initial=0)) + 1)
    lowest = np.minimum.accumulate(key)
    is_new = np.ones(count, dtype=bool)
    is_new[1:] = lowest[1:] < lowest[:-1]
    holder = np.maximum.accumulate(np.where(is_new, np.arange(count), 0))
    before = np.empty(count, dtype=np.intp)
    before[:1] = 0
    before[1:] = holder[:-1]
    return np.where(np.arange(count) == starts, starts, np.maximum(before, starts))


def _swept(columns: Points, cell: Indices) -> Indices:
    """Non-dominated rows of three objectives.

    A sweep along the first keeps the staircase of the other two over the rows of the cell seen so far: `ys`
    ascending, `zs` descending. A row is dominated when the last step at or before its y is no higher than its
    z.
    """
    ys: list[float] = []
    zs: list[float] = []
    kept: list[int] = []
    now = -1
    rows = zip(cell.tolist(), columns[:, 1].tolist(), columns[:, 2].tolist(), strict=True)
    for row, (own, y, z) in enumerate(rows):
        if own != now:
            now, ys, zs = own, [], []
        step = bisect_right(ys, y)
        if step and zs[step - 1] <= z:
            continue
        kept.append(row)
        start = bisect_left(ys, y, 0, step)
        end = start
        while end < len(zs) and zs[end] >= z:
            end += 1
        ys[start:end] = [y]
        zs[start:end] = [z]
    return np.asarray(kept, dtype=np.intp)


def _compared(columns: Points, cell: Indices) -> Indices:
    """Non-dominated rows of any number of objectives: each block against what was kept of its cells before
    it, then within itself."""
    kept = np.empty(0, dtype=np.intp)
    done: list[Indices] = []
    for start in range(0, len(columns), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(columns)))
        kept = kept[cell[kept] >= cell[start]]
        rows = rows[~_is_dominated(rows, kept, columns, cell)]
        rows = rows[~_is_dominated(rows, rows, columns, cell)]
        kept = np.concatenate([kept, rows])
        done.append(rows)
    return np.concatenate(done) if done else kept


def _is_dominated(rows: Indices, others: Indices, columns: Points, cell: Indices) -> npt.NDArray[np.bool_]:
    """Whether some of `others` that comes before a row is no larger in any objective."""
    is_below = (others[None, :] < rows[:, None]) & (cell[others][None, :] == cell[rows][:, None])
    for column in columns.T:
        is_below &= column[others][None, :] <= column[rows][:, None]
    return np.asarray(is_below.any(axis=1))


def _representatives(frontier: Points, epsilon: float) -> Indices:
    """The first point in each cell of a grid of cells a factor 1 + epsilon wide, and each minimum."""
    if (frontier < 0.0).any():
        raise InternalError("a relative epsilon needs objectives that are not negative")
    # A hair narrower than epsilon, so that rounding in the logarithm cannot widen a cell beyond it.
    width = np.log1p(epsilon) * (1.0 - 1e-9)
    with np.errstate(divide="ignore"):
        cells = np.floor(np.log(frontier) / width)
    _, first = np.unique(cells, axis=0, return_index=True)
    return np.unique(np.concatenate([first, np.argmin(frontier, axis=0)])) if len(frontier) else first
