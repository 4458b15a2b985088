"""Labels on staircases, as machine code: of two columns, where one place tells all, and of peaks on a few
levels besides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import NONE, Rows, machine_code

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class Met(NamedTuple):
    """Pairs of a cell: `costs` and `tops` (columns, pairs), `places` (the steps of the range of the grid, in
    those of the finest), weighted `sums`, and `rows` in both tables (2, pairs)."""

    costs: Values
    tops: Values
    places: Values
    sums: Values
    rows: Rows


class Kept(NamedTuple):
    """Labels of a cell, and room for more: their `costs` and `tops` (columns, labels), the range of the grid
    and the weighted sum of each (2, labels), and their `rows` in both tables (2, labels). Those that stay are
    on `sizes` (levels) staircases, or on one level in blocks: `order` (levels, labels) is where they lie;
    on a staircase `stairs` (levels, 2, labels) are what they cost."""

    costs: Values
    tops: Values
    ranks: Values
    rows: Rows
    stairs: npt.NDArray[np.float64]
    order: Indices
    sizes: Indices


@machine_code
def onto_stairs(kept: Kept, used: int, found: Met, near: int, levels: Values) -> int:
    """Take in so many pairs where at most two columns differ, and peaks on these levels; how many were taken
    in then. What stands for a pair on a lower level does here."""
    if len(levels) == 1:
        return _onto_level(kept, NONE, used, found, np.arange(near))
    own = np.searchsorted(levels, found.costs[-1, :near])
    for level in range(len(levels)):
        some = np.flatnonzero(own == level)
        for other in range(level):
            some = _unmatched(kept, other, found, some)
        before = used
        used = _onto_level(kept, level, used, found, some)
        for other in range(level + 1, len(levels)):
            for row in range(before, used):
                _fall(kept, other, kept.costs[0, row], kept.costs[1, row])
    return used


@machine_code
def _unmatched(kept: Kept, level: int, found: Met, some: Indices) -> Indices:
    """Those of some pairs for which no label of a lower level stands."""
    firsts, seconds, order = kept.stairs[level, 0], kept.stairs[level, 1], kept.order[level]
    places, size, left = kept.ranks[0], kept.sizes[level], 0
    for each in some:
        row = _first_beyond(firsts, size, found.tops[0, each]) - 1
        second_top, place = found.tops[1, each], found.places[each]
        while row >= 0 and seconds[row] < second_top and places[order[row]] > place:
            row -= 1
        if row < 0 or not seconds[row] < second_top:
            some[left] = each
            left += 1
    return some[:left]


@machine_code
def _fall(kept: Kept, level: int, first: float, second: float) -> None:
    """Take from a higher level what costs no less in both columns."""
    firsts, seconds, order = kept.stairs[level, 0], kept.stairs[level, 1], kept.order[level]
    size = kept.sizes[level]
    low = stop = _first_beyond(firsts, size, first)
    while stop < size and seconds[stop] >= second:
        stop += 1
    if stop > low:
        _shift(firsts, stop, size, low - stop)
        _shift(seconds, stop, size, low - stop)
        _shift(order, stop, size, low - stop)
        kept.sizes[level] = size + low - stop


@machine_code
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


@machine_code
def _onto_level(kept: Kept, level: int, used: int, found: Met, some: Indices) -> int:
    """Take in some pairs of one level; how many were taken in then. Those that stay ascend in the first
    column and descend in the second: of two that differ no other way the one that costs no more is in no
    coarser range."""
    firsts, seconds, order = kept.stairs[level, 0], kept.stairs[level, 1], kept.order[level]
    places, ranks, size = kept.ranks[0], kept.ranks[1], kept.sizes[level]
    for each in some:
        first, second, place = found.costs[0, each], found.costs[1, each], found.places[each]
        first_top, second_top, rank = found.tops[0, each], found.tops[1, each], found.sums[each]
        low = _first_beyond(firsts, size, first_top)
        row, is_matched = low - 1, False
        while row >= 0 and seconds[row] < second_top and not is_matched:
            own = order[row]
            if places[own] <= place:
                is_better = places[own] == place and rank < ranks[own]
                is_better &= first < kept.tops[0, own] and second < kept.tops[1, own]
                is_matched = not is_better or (firsts[row] <= first and seconds[row] <= second)
            row -= 1
        if is_matched:
            continue
        while low > 0 and firsts[low - 1] >= first:
            low -= 1
        stop = low
        while stop < size and seconds[stop] >= second:  # all that it is below
            stop += 1
        while low > 0 and _stands_for(kept, first, second, place, order[low - 1]):
            low -= 1
        while stop < size and _stands_for(kept, first, second, place, order[stop]):
            stop += 1
        shift = low + 1 - stop
        _shift(firsts, stop, size, shift)
        _shift(seconds, stop, size, shift)
        _shift(order, stop, size, shift)
        size += shift
        firsts[low], seconds[low], order[low] = first, second, used
        for c in range(len(found.costs)):
            kept.costs[c, used], kept.tops[c, used] = found.costs[c, each], found.tops[c, each]
        places[used], ranks[used] = place, rank
        kept.rows[0, used], kept.rows[1, used] = found.rows[0, each], found.rows[1, each]
        used += 1
    kept.sizes[level] = size
    return used


@machine_code
def _stands_for(kept: Kept, first: float, second: float, place: float, row: int) -> bool:
    """Whether a label stands for one of its level that was taken in."""
    is_below = first < kept.tops[0, row] and second < kept.tops[1, row]
    return bool(is_below and kept.ranks[0, row] >= place)


@machine_code
def _shift(values: npt.NDArray[np.generic], first: int, stop: int, by: int) -> None:
    """Move what lies from `first` to `stop`."""
    if by == 1:
        for at in range(stop, first, -1):
            values[at] = values[at - 1]
    elif by < 0:
        for at in range(first, stop):
            values[at + by] = values[at]
