"""Tables of frontiers: for each choice of some variables, all the costs that the rest can come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Costs, reduce

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_PAIRS_AT_ONCE = 1 << 21
"""Pairs of labels that a join holds in memory at a time."""

Keep = Callable[[Indices, Values], npt.NDArray[np.bool_]]
"""Of cells (n) and points (n, columns): which may still matter."""


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A frontier per cell, a cell being a choice of each of `variables` (of `sizes`; the flat index, the last
    variable fastest).

    `cells` (n) ascending, `points` (n, columns): label i costs points[i] in cell cells[i]. `origins` are the
    tables that it was made of and the rows in each; none where it is a cost as given.
    """

    variables: tuple[int, ...]
    sizes: tuple[int, ...]
    cells: Indices
    points: Values
    origins: tuple[tuple[Labels, Indices], ...] = ()

    def __len__(self) -> int:
        return len(self.cells)

    def coordinates(self, rows: Any = slice(None)) -> dict[int, Indices]:
        """The choice of each variable, for each label."""
        if not self.variables:
            return {}
        return dict(zip(self.variables, np.unravel_index(self.cells[rows], self.sizes), strict=True))


def labels_of(variables: tuple[int, ...], costs: Costs) -> Labels:
    """One label per finite cost of a factor."""
    sizes = costs.shape[:-1]
    points = costs.reshape(-1, costs.shape[-1])
    cells = np.flatnonzero(np.isfinite(points).all(axis=1))
    return Labels(variables, sizes, cells, points[cells])


def joined(a: Labels, b: Labels, *, without: int | None = None, keep: Keep | None = None) -> Labels:
    """What `a` and `b` cost together, in the cells of all their variables but `without`, reduced.

    The columns add, but for the last, of which the larger counts. Labels that `keep` does not are dropped
    before anything is compared.
    """
    left = tuple(v for v in sorted({*a.variables, *b.variables}) if v != without)
    size_of = dict(zip((*a.variables, *b.variables), (*a.sizes, *b.sizes), strict=True))
    sizes = tuple(size_of[variable] for variable in left)
    shared = tuple(variable for variable in a.variables if variable in b.variables)
    key_a, key_b = _keys(a, shared, size_of), _keys(b, shared, size_of)
    by_key = np.argsort(key_b, kind="stable")
    sorted_keys = key_b[by_key]
    first = np.searchsorted(sorted_keys, key_a, side="left")
    counts = np.searchsorted(sorted_keys, key_a, side="right") - first
    at_a, only_b = _strides(left, sizes, a), _strides(left, sizes, b, skip=shared)
    pieces: list[tuple[Indices, Values, Indices, Indices]] = []
    for start, stop in _chunks(counts):
        rows_a = np.repeat(np.arange(start, stop), counts[start:stop])
        ends = np.cumsum(counts[start:stop])
        within = np.arange(len(rows_a)) - np.repeat(ends - counts[start:stop], counts[start:stop])
        rows_b = by_key[first[rows_a] + within]
        cells = at_a[rows_a] + only_b[rows_b]
        points = _together(a.points[rows_a], b.points[rows_b])
        if keep is not None:
            is_kept = keep(cells, points)
            cells, points, rows_a, rows_b = (
                cells[is_kept], points[is_kept], rows_a[is_kept], rows_b[is_kept],
            )  # fmt: skip
        best = reduce(points, cells=cells)
        pieces.append((cells[best], points[best], rows_a[best], rows_b[best]))
    cells, points, rows_a, rows_b = _concatenated(pieces, a.points.shape[1])
    if len(pieces) > 1:
        best = reduce(points, cells=cells)
        cells, points, rows_a, rows_b = cells[best], points[best], rows_a[best], rows_b[best]
    return Labels(left, sizes, cells, points, ((a, rows_a), (b, rows_b)))


def _concatenated(
    pieces: list[tuple[Indices, Values, Indices, Indices]], columns: int
) -> tuple[Indices, Values, Indices, Indices]:
    if not pieces:
        none = np.empty(0, dtype=np.intp)
        return none, np.empty((0, columns)), none, none
    cells, points, rows_a, rows_b = (np.concatenate(each) for each in zip(*pieces, strict=True))
    return cells, points, rows_a, rows_b


def _together(a: Values, b: Values) -> Values:
    points = a + b
    points[:, -1] = np.maximum(a[:, -1], b[:, -1])
    return points


def _keys(table: Labels, shared: tuple[int, ...], size_of: dict[int, int]) -> Indices:
    """The flat index of the shared variables, for each label."""
    at = table.coordinates()
    key = np.zeros(len(table), dtype=np.intp)
    for variable in shared:
        key = key * size_of[variable] + at[variable]
    return key


def _strides(
    left: tuple[int, ...], sizes: tuple[int, ...], table: Labels, skip: tuple[int, ...] = ()
) -> Indices:
    """What the variables of `table` add to the flat index of the cells `left`, for each label."""
    at = table.coordinates()
    index = np.zeros(len(table), dtype=np.intp)
    for variable, size in zip(left, sizes, strict=True):
        index = index * size
        if variable in at and variable not in skip:
            index = index + at[variable]
    return index


def _chunks(counts: Indices) -> list[tuple[int, int]]:
    """Ranges of rows with about as many pairs as fit at once."""
    if not len(counts):
        return []
    ends = np.cumsum(counts)
    cuts = np.searchsorted(ends, np.arange(_PAIRS_AT_ONCE, int(ends[-1]), _PAIRS_AT_ONCE)) + 1
    edges = [0, *sorted(set(cuts.tolist())), len(counts)]
    return [(start, stop) for start, stop in pairwise(edges) if stop > start]


def origins_of(table: Labels, row: int) -> list[tuple[Labels, int]]:
    """The given costs that a label is the sum of: their tables and rows."""
    if not table.origins:
        return [(table, row)]
    return [found for origin, rows in table.origins for found in origins_of(origin, int(rows[row]))]


def chosen(table: Labels, row: int) -> dict[int, int]:
    """The choice of every variable that went into a label."""
    found: dict[int, int] = {}
    for origin, own in origins_of(table, row):
        found |= {variable: int(at[0]) for variable, at in origin.coordinates([own]).items()}
    return found
