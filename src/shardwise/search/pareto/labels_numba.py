"""Joins of labels up to dominance in compiled loops.

Pairs are processed cell by cell, roughly by ascending weighted sum, in batches. Only columns in which labels
differ are computed. Pairs below the limit are compared with the labels that stay. If at most two columns
differ, these labels form a staircase that is searched by bisection. If the peak also differs, in few values,
there is one staircase for each value. Otherwise labels are compared in blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto.compilation import numba_compiled, numba_inlined
from shardwise.search.pareto.joins_numba import (
    NONE,
    TOO_MANY,
    DominanceArrays,
    PreparedSide,
    PruningArrays,
    Rows,
    Side,
    fractions,
    whole_numbers,
    wider_rows,
)

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class PairBatch(NamedTuple):
    """Pairs of one cell: `costs` and `tops` (columns, pairs), `places` (the step of each pair's grid, in
    steps of the finest), weighted `sums`, and `rows` in both tables (2, pairs)."""

    costs: Values
    tops: Values
    places: Values
    sums: Values
    rows: Rows


class LabelStore(NamedTuple):
    """Labels of one cell, with spare capacity.

    Of each label: `costs` and `tops` (columns, labels), `ranks` (2, labels) with the step of its grid and its
    weighted sum, and `rows` in both tables (2, labels). Labels that stay are on one staircase per peak value,
    with `sizes` (peak values) labels each, or in one list of blocks. `order` (peak values, labels) holds
    their positions, `frontiers` (peak values, 2, labels) the costs on a staircase.
    """

    costs: Values
    tops: Values
    ranks: Values
    rows: Rows
    frontiers: npt.NDArray[np.float64]
    order: Indices
    sizes: Indices


@numba_inlined
def insert_sorted(store: LabelStore, used: int, found: PairBatch, pending: int, peak_values: Values) -> int:
    """Insert pairs where at most two columns differ besides the peak, which has these values; returns the
    labels used. A label with a lower peak value also stands for a pair."""
    if len(peak_values) == 1:
        some = np.empty(pending, np.intp)
        for each in range(pending):
            some[each] = each
        return _insert_in_frontier(store, NONE, used, found, some)
    peaks = found.costs[-1]
    for peak_place in range(len(peak_values)):
        some, count = np.empty(pending, np.intp), 0
        for each in range(pending):
            if _first_beyond(peak_values, len(peak_values), peaks[each]) == peak_place:
                some[count] = each
                count += 1
        some = some[:count]
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
    """The pairs that no label of a lower peak value dominates."""
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
    """Remove from a higher peak value the labels that cost no less in both columns."""
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
    """Position of the first of `size` ascending values that is not below `first`."""
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
    """Insert pairs of one peak value; returns the labels used.

    The labels that stay ascend in the first column and descend in the second. Of two labels that differ in no
    other way, the one that costs no more is not on a coarser grid.
    """
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
        while stop < size and seconds[stop] >= second:  # all that it dominates
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
    """Whether a new label stands for a stored one of its peak value."""
    is_below = first < store.tops[0, row] and second < store.tops[1, row]
    return bool(is_below and store.ranks[0, row] >= place)


@numba_compiled
def _shift(values: npt.NDArray[np.generic], first: int, stop: int, by: int) -> None:
    """Move the values from `first` to `stop` by `by` positions."""
    if by == 1:
        for at in range(stop, first, -1):
            values[at] = values[at - 1]
    elif by < 0:
        for at in range(first, stop):
            values[at + by] = values[at]


_FEW = 1024
"""Initial capacity for labels."""

_BLOCK = 64
"""Labels that are compared at a time."""

_SORTED_COLUMNS = 2
"""Columns that a staircase sorts."""

_MOST_PEAK_VALUES = 16
"""Most peak values with a staircase each."""


class Differing(NamedTuple):
    """The columns in which the labels of a join differ: `ours` (columns, rows of one table), `theirs`
    (columns, rows of the other), `weights` (multipliers, columns), and `excess` (columns), the weights of the
    excess.

    The other columns are constant: their sum is `fixed` (multipliers, then the excess), and their `peak` is
    that of both tables. `is_peak` tells whether peaks differ.
    """

    ours: Values
    theirs: Values
    weights: Values
    excess: Values
    fixed: Values
    peak: float
    is_peak: bool


@numba_compiled
def joined_sides(
    one: PreparedSide,
    other: PreparedSide,
    choices: int,
    pruning: PruningArrays,
    dominance: DominanceArrays,
    most_pairs: int,
    most_labels: int,
) -> tuple[int, int, Rows, Values]:
    """The join of two tables: the pairs of rows that no other pair of their cell stands for.

    Returns their number (TOO_MANY if a limit is exceeded), the pairs compared, of each pair that stays its
    rows in both tables and its cell (ascending), and its costs. A pair stands for another if it is not on a
    coarser grid and is at most the other's step above it in any column. Of two pairs that stand for each
    other, the one of least sum stays.
    """
    a, differs, order_a = one
    b, also, order_b = other
    width = len(differs)
    columns = _columns(differs, also)
    multipliers, count = pruning.weights.shape[0], len(columns)
    differing = _differing(a, b, pruning, dominance, columns)
    widest = _widest(b)
    few = max(widest, min(_FEW, _widest(a) * widest * choices))
    rows = np.empty((3, few), np.intp)
    peak_values = _peak_values(a, b, pruning, differing, dominance)
    store, batch, fixed = (
        _new_store(count, max(len(peak_values), 1), few),
        _new_batch(count, few),
        np.empty(multipliers + 1),
    )
    done = pairs = 0
    for cell in range(len(a.base)):
        if multipliers and not pruning.outside[cell, 0] < pruning.limit:
            continue
        for peak_place in range(len(store.sizes)):
            store.sizes[peak_place] = 0
        used, pending = NONE, NONE  # labels inserted, pairs in the batch
        choice, i = NONE, NONE - 1
        while choice < choices and pairs <= most_pairs:
            choice, i, pending, some = _fill_batch(
                a, b, choices, differing, pruning, dominance, cell, choice, i, fixed, batch, pending
            )
            pairs += some
            if pending == 0:
                continue
            store, used = _insert(
                store,
                used,
                batch,
                pending,
                float(fixed[multipliers]),
                differing,
                dominance,
                columns,
                peak_values,
            )
            pending = 0
            if done + _number_of_labels(store) > most_labels:
                return TOO_MANY, pairs, rows, np.empty((0, width))
        size = _number_of_labels(store)
        while done + size > rows.shape[1]:
            rows = wider_rows(rows)
        for peak_place in range(len(store.sizes)):
            for row in range(store.sizes[peak_place]):
                own = store.order[peak_place, row]
                rows[0, done], rows[1, done] = store.rows[0, own], store.rows[1, own]
                rows[2, done] = cell
                done += 1
        if pairs > most_pairs:
            return TOO_MANY, pairs, rows, np.empty((0, width))
    points = np.empty((done, width))
    for row in range(done):
        i, j = rows[0, row], rows[1, row]
        for k in range(width - 1):
            points[row, k] = a.points[i, k] + b.points[j, k]
        points[row, -1] = max(max(a.points[i, -1], b.points[j, -1]), pruning.peaks[rows[2, row]])
        rows[0, row], rows[1, row] = order_a[i], order_b[j]
    return done, pairs, rows[:, :done], points


@numba_compiled
def _columns(differs: Values, also: Values) -> Indices:
    """The columns in which the labels of either table differ."""
    columns, count = np.empty(len(differs), np.intp), 0
    for k in range(len(differs)):
        if differs[k] + also[k] > 0.0:
            columns[count] = k
            count += 1
    return columns[:count]


@numba_compiled
def _widest(side: Side) -> int:
    """The most rows of a cell; at least 1."""
    widest = 1
    for cell in range(len(side.start) - 1):
        widest = max(widest, side.start[cell + 1] - side.start[cell])
    return widest


@numba_compiled
def _differing(
    a: Side, b: Side, pruning: PruningArrays, dominance: DominanceArrays, columns: Indices
) -> Differing:
    """The columns in which two tables differ, and the sums of the constant ones."""
    multipliers, width = pruning.weights.shape
    count = len(columns)
    ours, theirs = np.empty((count, len(a.points))), np.empty((count, len(b.points)))
    weights, excess, fixed = np.empty((multipliers, count)), np.empty(count), fractions(multipliers + 1, 0.0)
    for c in range(count):
        for row in range(len(a.points)):
            ours[c, row] = a.points[row, columns[c]]
        for row in range(len(b.points)):
            theirs[c, row] = b.points[row, columns[c]]
        excess[c] = dominance.weights[columns[c]]
        for multiplier in range(multipliers):
            weights[multiplier, c] = pruning.weights[multiplier, columns[c]]
    peak = 0.0
    if len(a.points) and len(b.points):
        peak = max(a.points[0, -1], b.points[0, -1])
        for k in range(width - 1):
            is_fixed = True
            for c in range(count):
                is_fixed &= columns[c] != k
            if is_fixed:
                own = a.points[0, k] + b.points[0, k]
                for multiplier in range(multipliers):
                    fixed[multiplier] += own * pruning.weights[multiplier, k]
                fixed[multipliers] += own * dominance.weights[k]
    return Differing(ours, theirs, weights, excess, fixed, peak, count > 0 and columns[-1] == width - 1)


@numba_compiled
def _peak_values(
    a: Side, b: Side, pruning: PruningArrays, differing: Differing, dominance: DominanceArrays
) -> Values:
    """The ascending values that the peaks of pairs can have, in steps of the finest grid, if two more columns
    differ. One value if at most two columns differ; none if there are too many values."""
    count = len(differing.ours)
    if count <= _SORTED_COLUMNS:
        return fractions(1, 0.0)
    found, peak_values = np.empty(_MOST_PEAK_VALUES), 0
    if count > _SORTED_COLUMNS + 1 or not differing.is_peak:
        return found[:0]
    for peaks in (differing.ours[-1], differing.theirs[-1], pruning.peaks):
        for peak in peaks:
            row = _first_beyond(found, peak_values, peak)
            if row < peak_values and found[row] == peak:
                continue
            if peak_values == _MOST_PEAK_VALUES:
                return found[:0]
            for at in range(peak_values, row, -1):
                found[at] = found[at - 1]
            found[row] = peak
            peak_values += 1
    step = dominance.steps[-1]
    if step > 0.0:
        for peak_place in range(peak_values):
            found[peak_place] /= step
    return found[:peak_values]


@numba_compiled
def _fill_batch(
    a: Side, b: Side, choices: int, differing: Differing, pruning: PruningArrays,
    dominance: DominanceArrays, cell: int, choice: int,
    i: int, fixed: Values, batch: PairBatch, pending: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Add needed pairs of a cell to a batch, from row i of a choice on (-1: its first row), until it is full:
    where to continue, number of pairs in the batch, and number of pairs compared.

    `fixed` is set to the sum of the constant columns and the least outside under each multiplier, and to
    their part of the excess.
    """
    multipliers, count = differing.weights.shape
    peak = pruning.peaks[cell]
    last = count - 1 if differing.is_peak else count
    own_peak = 0.0 if differing.is_peak else max(differing.peak, peak)
    for multiplier in range(multipliers):
        fixed[multiplier] = pruning.outside[cell, multiplier] + differing.fixed[multiplier]
        fixed[multiplier] += own_peak * pruning.weights[multiplier, -1]
    fixed[multipliers] = (
        dominance.potential[cell] + differing.fixed[multipliers] + own_peak * dominance.weights[-1]
    )
    outside = pruning.outside[cell, 0] if multipliers else 0.0
    pairs = 0
    while choice < choices:
        at_a, at_b = a.base[cell] + choice * a.stride, b.base[cell] + choice * b.stride
        first, end = b.start[at_b], b.start[at_b + 1]
        stop = a.start[at_a + 1] if first < end else a.start[at_a]
        i = max(i, a.start[at_a])
        while i < stop:
            remaining = pruning.limit - outside - a.sums[i]
            if b.sums[first] > remaining:
                break
            if pending + end - first > len(batch.sums):
                return choice, i, pending, pairs
            for j in range(first, end):
                if b.sums[j] > remaining:
                    break
                pairs += 1
                for c in range(last):
                    batch.costs[c, pending] = differing.ours[c, i] + differing.theirs[c, j]
                if last < count:
                    batch.costs[last, pending] = max(
                        max(differing.ours[last, i], differing.theirs[last, j]), peak
                    )
                total = 0.0
                for multiplier in range(multipliers - 1, -1, -1):  # ends with the first multipliers
                    total = fixed[multiplier]
                    for c in range(count):
                        total += differing.weights[multiplier, c] * batch.costs[c, pending]
                    if not total < pruning.limit:
                        break
                if total < pruning.limit:
                    batch.sums[pending], batch.rows[0, pending], batch.rows[1, pending] = total, i, j
                    pending += 1
            i += 1
        choice, i = choice + 1, -1
    return choice, i, pending, pairs


@numba_inlined
def _insert(
    store: LabelStore, used: int, batch: PairBatch, pending: int, fixed: float, differing: Differing,
    dominance: DominanceArrays,
    columns: Indices, peak_values: Values,
) -> tuple[LabelStore, int]:  # fmt: skip
    """Insert the pairs of a batch among the labels of their cell; returns the store and the labels used.
    `fixed` is the constant columns' part of the excess."""
    if used + pending > store.order.shape[1]:
        store, used = _larger_store(store, pending), _number_of_labels(store)
    _round_to_steps(batch, pending, fixed, differing.excess, dominance, columns)
    if len(peak_values):
        used = insert_sorted(store, used, batch, pending, peak_values)
    else:
        used = _insert_in_blocks(store, store.sizes[0], batch, pending)
        store.sizes[0] = used
    return store, used


@numba_compiled
def _new_batch(count: int, size: int) -> PairBatch:
    """A batch with capacity for so many pairs."""
    width = max(count, _SORTED_COLUMNS)
    costs, tops = _spare(width, size)
    return PairBatch(costs, tops, fractions(size, 0.0), fractions(size, 0.0), np.empty((2, size), np.intp))


@numba_compiled
def _spare(width: int, size: int) -> tuple[Values, Values]:
    """Costs 0 and tops 1, of so many columns: what a column without a difference has."""
    costs, tops = np.empty((width, size)), np.empty((width, size))
    for c in range(width):
        for row in range(size):
            costs[c, row], tops[c, row] = 0.0, 1.0
    return costs, tops


@numba_compiled
def _round_to_steps(
    found: PairBatch,
    pending: int,
    fixed: float,
    weights: Values,
    dominance: DominanceArrays,
    columns: Indices,
) -> None:
    """Set the grid step of each pair, its costs in steps of the finest grid, and the tops of its grid cell: a
    label below the tops stands for it."""
    places = found.places
    for each in range(pending):
        places[each] = 1.0
    if dominance.rate > 0.0:
        for each in range(pending):
            excess = fixed
            for c in range(len(columns)):
                excess += weights[c] * found.costs[c, each]
            remaining = (1.0 + dominance.rate * excess) / 2.0
            while remaining >= places[each]:
                places[each] *= 2.0
    for c in range(len(columns)):
        costs, tops, step = found.costs[c], found.tops[c], dominance.steps[columns[c]]
        for each in range(pending):
            if step > 0.0:
                costs[each] /= step
                tops[each] = (math.floor(costs[each] / places[each]) + 1.0) * places[each]
            else:
                tops[each] = np.nextafter(costs[each], np.inf)


@numba_compiled
def _new_store(count: int, peak_values: int, size: int) -> LabelStore:
    """A store for `size` labels on so many peak values, with at least two columns."""
    width = max(count, _SORTED_COLUMNS)
    costs, tops = _spare(width, size)
    ranks, rows = np.empty((2, size)), np.empty((2, size), np.intp)
    order = np.empty((peak_values, size), np.intp)
    for peak_place in range(peak_values):
        for row in range(size):
            order[peak_place, row] = row
    return LabelStore(
        costs, tops, ranks, rows, np.empty((peak_values, 2, size)), order, whole_numbers(peak_values, NONE)
    )


@numba_compiled
def _number_of_labels(store: LabelStore) -> int:
    """The labels that stay, on all staircases."""
    size = NONE
    for peak_place in range(len(store.sizes)):
        size += store.sizes[peak_place]
    return size


@numba_compiled
def _larger_store(store: LabelStore, extra: int) -> LabelStore:
    """The labels that stay, in a larger store with capacity for `extra` more."""
    peak_values = len(store.sizes)
    found = _new_store(len(store.costs), peak_values, max(2 * (_number_of_labels(store) + extra), _FEW))
    to = 0
    for peak_place in range(peak_values):
        for row in range(store.sizes[peak_place]):
            own = store.order[peak_place, row]
            for c in range(len(store.costs)):
                found.costs[c, to], found.tops[c, to] = store.costs[c, own], store.tops[c, own]
            for k in range(2):
                found.ranks[k, to], found.rows[k, to] = store.ranks[k, own], store.rows[k, own]
                found.frontiers[peak_place, k, row] = store.frontiers[peak_place, k, row]
            found.order[peak_place, row] = to
            to += 1
        found.sizes[peak_place] = store.sizes[peak_place]
    return found


@numba_inlined
def _insert_in_blocks(store: LabelStore, size: int, found: PairBatch, pending: int) -> int:
    """Insert pairs where more than two columns differ; returns the number of labels."""
    costs, tops, ranks = store.costs, store.tops, store.ranks
    cost, top = np.empty(len(costs)), np.empty(len(costs))
    for each in range(pending):
        for c in range(len(costs)):
            cost[c], top[c] = found.costs[c, each], found.tops[c, each]
        place, rank = found.places[each], found.sums[each]
        row = _next_below(costs, ranks, top, place, NONE, size)
        while row >= 0 and ranks[0, row] == place and rank < ranks[1, row]:
            if not _is_below(cost, tops, row):
                break
            row = _next_below(costs, ranks, top, place, row + 1, size)  # the new pair is the better of both
        if row >= 0:
            _swap(store, row, row // 2)  # a label that dominates many is found sooner next time
            continue
        row = _next_above(cost, place, tops, ranks, NONE, size)
        while row >= 0:  # the last label replaces the removed one
            size -= 1
            _swap(store, row, size)
            row = _next_above(cost, place, tops, ranks, row, size)
        for c in range(len(cost)):
            costs[c, size], tops[c, size] = cost[c], top[c]
        ranks[0, size], ranks[1, size] = place, rank
        store.rows[0, size], store.rows[1, size] = found.rows[0, each], found.rows[1, each]
        size += 1
    return size


@numba_compiled
def _is_below(cost: Values, tops: Values, row: int) -> bool:
    """Whether a label costs less than the tops of another in every column."""
    is_below = True
    for c in range(len(cost)):
        is_below &= cost[c] < tops[c, row]
    return is_below


@numba_compiled
def _next_below(costs: Values, ranks: Values, top: Values, place: float, first: int, size: int) -> int:
    """The first of `size` labels, from `first` on, that is not on a coarser grid than `place` and is below
    `top` in every column; -1 if none. Blocks are compared without a branch, so the compiler vectorises
    them."""
    count = len(top)
    for start in range(first, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        places, hits = ranks[0, start:stop], 0
        if count == 2:
            one, two = costs[0, start:stop], costs[1, start:stop]
            for row in range(len(places)):
                hits += (places[row] <= place) & (one[row] < top[0]) & (two[row] < top[1])
        elif count == 3:
            one, two, three = costs[0, start:stop], costs[1, start:stop], costs[2, start:stop]
            for row in range(len(places)):
                is_hit = (places[row] <= place) & (one[row] < top[0]) & (two[row] < top[1])
                hits += is_hit & (three[row] < top[2])
        elif count == 4:
            one, two, three = costs[0, start:stop], costs[1, start:stop], costs[2, start:stop]
            four = costs[3, start:stop]
            for row in range(len(places)):
                is_hit = (places[row] <= place) & (one[row] < top[0]) & (two[row] < top[1])
                hits += is_hit & (three[row] < top[2]) & (four[row] < top[3])
        else:
            hits = 1
        if hits:
            for row in range(start, stop):
                is_hit = ranks[0, row] <= place
                for c in range(count):
                    is_hit &= costs[c, row] < top[c]
                if is_hit:
                    return row
    return -1


@numba_compiled
def _next_above(cost: Values, place: float, tops: Values, ranks: Values, first: int, size: int) -> int:
    """The first of `size` labels, from `first` on, that is not on a finer grid than `place` and whose tops
    are all above `cost`; -1 if none."""
    count = len(cost)
    for start in range(first, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        places, hits = ranks[0, start:stop], 0
        if count == 2:
            one, two = tops[0, start:stop], tops[1, start:stop]
            for row in range(len(places)):
                hits += (places[row] >= place) & (one[row] > cost[0]) & (two[row] > cost[1])
        elif count == 3:
            one, two, three = tops[0, start:stop], tops[1, start:stop], tops[2, start:stop]
            for row in range(len(places)):
                is_hit = (places[row] >= place) & (one[row] > cost[0]) & (two[row] > cost[1])
                hits += is_hit & (three[row] > cost[2])
        elif count == 4:
            one, two, three = tops[0, start:stop], tops[1, start:stop], tops[2, start:stop]
            four = tops[3, start:stop]
            for row in range(len(places)):
                is_hit = (places[row] >= place) & (one[row] > cost[0]) & (two[row] > cost[1])
                hits += is_hit & (three[row] > cost[2]) & (four[row] > cost[3])
        else:
            hits = 1
        if hits:
            for row in range(start, stop):
                is_hit = ranks[0, row] >= place
                for c in range(count):
                    is_hit &= tops[c, row] > cost[c]
                if is_hit:
                    return row
    return -1


@numba_compiled
def _swap(store: LabelStore, one: int, other: int) -> None:
    """Swap two labels of a cell."""
    for c in range(len(store.costs)):
        store.costs[c, one], store.costs[c, other] = store.costs[c, other], store.costs[c, one]
        store.tops[c, one], store.tops[c, other] = store.tops[c, other], store.tops[c, one]
    for k in range(2):
        store.ranks[k, one], store.ranks[k, other] = store.ranks[k, other], store.ranks[k, one]
        store.rows[k, one], store.rows[k, other] = store.rows[k, other], store.rows[k, one]
