"""Labels on staircases, as machine code: of two columns, where one place tells all, and of peaks on a few
levels besides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import NONE, Rows, numba_compiled

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class PairBatch(NamedTuple):
    """Pairs of a cell: `costs` and `tops` (columns, pairs), `places` (the steps of the range of the grid, in
    those of the finest), weighted `sums`, and `rows` in both tables (2, pairs)."""

    costs: Values
    tops: Values
    places: Values
    sums: Values
    rows: Rows


class LabelStore(NamedTuple):
    """Labels of a cell, and room for more: their `costs` and `tops` (columns, labels), the range of the grid
    and the weighted sum of each (2, labels), and their `rows` in both tables (2, labels). Those that stay are
    on `sizes` (levels) staircases, or on one level in blocks: `order` (levels, labels) is where they lie;
    on a staircase `frontiers` (levels, 2, labels) are what they cost."""

    costs: Values
    tops: Values
    ranks: Values
    rows: Rows
    frontiers: npt.NDArray[np.float64]
    order: Indices
    sizes: Indices


@numba_compiled
def insert_sorted(store: LabelStore, used: int, found: PairBatch, pending: int, peak_values: Values) -> int:
    """Take in so many pairs where at most two columns differ, and peaks on these levels; how many were taken
    in then. What stands for a pair on a lower level does here."""
    if len(peak_values) == 1:
        return _insert_in_frontier(store, NONE, used, found, np.arange(pending))
    own = np.searchsorted(peak_values, found.costs[-1, :pending])
    for peak_place in range(len(peak_values)):
        some = np.flatnonzero(own == peak_place)
        for other in range(peak_place):
            some = _undominated(store, other, found, some)
        before = used
        used = _insert_in_frontier(store, peak_place, used, found, some)
        for other in range(peak_place + 1, len(peak_values)):
            for row in range(before, used):
                _drop_dominated(store, other, store.costs[0, row], store.costs[1, row])
    return used


@numba_compiled
def _undominated(store: LabelStore, peak_place: int, found: PairBatch, some: Indices) -> Indices:
    """Those of some pairs for which no label of a lower level stands."""
    firsts, seconds, order = (
        store.frontiers[peak_place, 0],
        store.frontiers[peak_place, 1],
        store.order[peak_place],
    )
    places, size, left = store.ranks[0], store.sizes[peak_place], 0
    for each in some:
        row = _first_beyond(firsts, size, found.tops[0, each]) - 1
        second_top, place = found.tops[1, each], found.places[each]
        while row >= 0 and seconds[row] < second_top and places[order[row]] > place:
            row -= 1
        if row < 0 or not seconds[row] < second_top:
            some[left] = each
            left += 1
    return some[:left]


@numba_compiled
def _drop_dominated(store: LabelStore, peak_place: int, first: float, second: float) -> None:
    """Take from a higher level what costs no less in both columns."""
    firsts, seconds, order = (
        store.frontiers[peak_place, 0],
        store.frontiers[peak_place, 1],
        store.order[peak_place],
    )
    size = store.sizes[peak_place]
    low = stop = _first_beyond(firsts, size, first)
    while stop < size and seconds[stop] >= second:
        stop += 1
    if stop > low:
        _shift(firsts, stop, size, low - stop)
        _shift(seconds, stop, size, low - stop)
        _shift(order, stop, size, low - stop)
        store.sizes[peak_place] = size + low - stop


@numba_compiled
def _first_beyond(firsts: Values, size: int, first: float) -> int:
    """The first of so many ascending values that is not below one."""
    low, end = 0, size
    while low < end:
        middle = (low + end) // 2
        if firsts[middle] < first:
            low = middle + 1
        else:
            end = middle
    return low


@numba_compiled
def _insert_in_frontier(
    store: LabelStore, peak_place: int, used: int, found: PairBatch, some: Indices
) -> int:
    """Take in some pairs of one level; how many were taken in then. Those that stay ascend in the first
    column and descend in the second: of two that differ no other way the one that costs no more is in no
    coarser range."""
    firsts, seconds, order = (
        store.frontiers[peak_place, 0],
        store.frontiers[peak_place, 1],
        store.order[peak_place],
    )
    places, ranks, size = store.ranks[0], store.ranks[1], store.sizes[peak_place]
    for each in some:
        first, second, place = found.costs[0, each], found.costs[1, each], found.places[each]
        first_top, second_top, rank = found.tops[0, each], found.tops[1, each], found.sums[each]
        low = _first_beyond(firsts, size, first_top)
        row, is_matched = low - 1, False
        while row >= 0 and seconds[row] < second_top and not is_matched:
            own = order[row]
            if places[own] <= place:
                is_better = places[own] == place and rank < ranks[own]
                is_better &= first < store.tops[0, own] and second < store.tops[1, own]
                is_matched = not is_better or (firsts[row] <= first and seconds[row] <= second)
            row -= 1
        if is_matched:
            continue
        while low > 0 and firsts[low - 1] >= first:
            low -= 1
        stop = low
        while stop < size and seconds[stop] >= second:  # all that it is below
            stop += 1
        while low > 0 and _dominates(store, first, second, place, order[low - 1]):
            low -= 1
        while stop < size and _dominates(store, first, second, place, order[stop]):
            stop += 1
        shift = low + 1 - stop
        _shift(firsts, stop, size, shift)
        _shift(seconds, stop, size, shift)
        _shift(order, stop, size, shift)
        size += shift
        firsts[low], seconds[low], order[low] = first, second, used
        for c in range(len(found.costs)):
            store.costs[c, used], store.tops[c, used] = found.costs[c, each], found.tops[c, each]
        places[used], ranks[used] = place, rank
        store.rows[0, used], store.rows[1, used] = found.rows[0, each], found.rows[1, each]
        used += 1
    store.sizes[peak_place] = size
    return used


@numba_compiled
def _dominates(store: LabelStore, first: float, second: float, place: float, row: int) -> bool:
    """Whether a label stands for one of its level that was taken in."""
    is_below = first < store.tops[0, row] and second < store.tops[1, row]
    return bool(is_below and store.ranks[0, row] >= place)


@numba_compiled
def _shift(values: npt.NDArray[np.generic], first: int, stop: int, by: int) -> None:
    """Move what lies from `first` to `stop`."""
    if by == 1:
        for at in range(stop, first, -1):
            values[at] = values[at - 1]
    elif by < 0:
        for at in range(first, stop):
            values[at + by] = values[at]
