"""Dominance among very many labels on a grid, without sorting them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.intp]
Steps = npt.NDArray[np.float64]

BINS_FROM_ROWS = 4096
"""Rows for which sorting is no dearer."""

MOST_BINS = 1 << 24
"""Bins held at a time."""

MOST_BINS_EACH = 64
"""Bins for each row, beyond which sorting is no dearer."""

WIDEST = 1 << 22
"""Steps from the least to the largest of one column."""


def undominated_in_bins(cells: Indices, steps: list[Steps]) -> Indices:
    """Rows that no other row of their cell dominates: all of these, and some that others equal.

    `steps` are columns of whole numbers. Rows fall into bins by cell and by all columns but the first; the
    least of the first column is kept per bin and carried on to all bins that are no less in each column.
    Where that would take too much room, or there are more than four columns, all rows.
    """
    every = np.arange(len(cells), dtype=np.intp)
    if len(cells) < BINS_FROM_ROWS or not 1 < len(steps) <= 4:
        return every
    classes = [_classes(column) for column in (cells, *steps[1:])]
    found = [each for each in classes if each is not None]
    sizes = tuple(size for _, size in found)
    most = min(MOST_BINS, MOST_BINS_EACH * len(cells))
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
    """The rank of each value among those that occur, and how many there are; None where they lie too far
    apart."""
    low, high = column.min(), column.max()
    if high - low >= WIDEST:
        return None
    own = (column - low).astype(np.intp)
    is_seen = np.zeros(int(high - low) + 1, dtype=bool)
    is_seen[own] = True
    ranks = np.cumsum(is_seen) - 1
    return ranks[own], int(ranks[-1]) + 1
