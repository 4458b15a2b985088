"""Which labels of a join stay, as machine code: what `labels` and `grid` do in numpy where numba is not
installed.

Pairs are gone through cell by cell and row by row, roughly by weighted sum, many at a time: what they cost in
the columns that differ is worked out, and what is left of them after the limits is held against the labels
that stay. Where two columns differ, or fewer, these lie on a staircase, where one place tells all; where
peaks differ besides, in few levels, on one for each level; else they are compared in blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.compiled import (
    NONE,
    TOO_MANY,
    Loss,
    Reach,
    Rows,
    Side,
    Sided,
    machine_code,
    wider_rows,
)
from shardwise.search.tracking.compiled_stairs import Kept, Met, onto_stairs

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_FEW = 1024
"""Labels that there is room for at first."""

_BLOCK = 64
"""Labels that are compared at a time."""

_STAIRS = 2
"""Columns that a staircase orders."""

_MOST_LEVELS = 16
"""Levels of peaks that have a staircase each."""


class Differing(NamedTuple):
    """The columns in which the labels of a join differ: `ours` (columns, rows of one table), `theirs`
    (columns, rows of the other), `weights` (forms, columns), and `excess` (columns), the weights of the
    excess. The others come to `fixed` (forms, and the excess) and to a `peak` of both tables; `is_peak` where
    peaks differ."""

    ours: Values
    theirs: Values
    weights: Values
    excess: Values
    fixed: Values
    peak: float
    is_peak: bool


@machine_code
def joined_sides(
    one: Sided, other: Sided, choices: int, reach: Reach, loss: Loss, most_pairs: int, most_labels: int
) -> tuple[int, Rows, Values]:
    """What two tables come to: how many labels (TOO_MANY where these or pairs are too many), of each its rows
    in both and its cell, which ascends, and what it costs."""
    a, differs, order_a = one
    b, also, order_b = other
    columns, differing = np.empty(len(differs), np.intp), 0
    for k in range(len(differs)):
        if differs[k] + also[k] > 0.0:
            columns[differing] = k
            differing += 1
    count, rows = labels_of_pairs(a, b, choices, reach, loss, columns[:differing], most_pairs, most_labels)
    points = np.empty((max(count, 0), len(differs)))
    for row in range(count):
        i, j, cell = rows[0, row], rows[1, row], rows[2, row]
        for k in range(len(differs) - 1):
            points[row, k] = a.points[i, k] + b.points[j, k]
        points[row, -1] = max(a.points[i, -1], b.points[j, -1], reach.peaks[cell])
        rows[0, row], rows[1, row] = order_a[i], order_b[j]
    return count, rows, points


@machine_code
def labels_of_pairs(
    a: Side,
    b: Side,
    choices: int,
    reach: Reach,
    loss: Loss,
    columns: Indices,
    most_pairs: int,
    most_labels: int,
) -> tuple[int, Rows]:
    """Pairs of rows that no other pair of their cell stands for: how many (TOO_MANY where pairs or labels are
    too many), and for each its rows in both and its cell, which ascends. Only `columns` differ.

    A pair stands for another one if it is in no coarser range of the grid, and no further in any column than
    the other one's step of it; of those that stand for each other the one of least sum stays.
    """
    forms, count = reach.weights.shape[0], len(columns)
    differing = _differing(a, b, reach, loss, columns)
    widest = _widest(b)
    few = max(widest, min(_FEW, _widest(a) * widest * choices))
    rows = np.empty((3, few), np.intp)
    levels = _levels(a, b, reach, differing, loss)
    kept, met, fixed = _room(count, max(len(levels), 1), few), _met(count, few), np.empty(forms + 1)
    done = pairs = 0
    for cell in range(len(a.base)):
        if forms and not reach.outside[cell, 0] < reach.limit:
            continue
        kept.sizes[:] = 0
        used, near = NONE, NONE  # labels that were taken in, pairs that wait
        choice, i = NONE, NONE - 1
        while choice < choices and pairs <= most_pairs:
            choice, i, near, some = _meet(
                a, b, choices, differing, reach, loss, cell, choice, i, fixed, met, near
            )
            pairs += some
            if near == 0:
                continue
            kept, used = _taken_in(
                kept, used, met, near, float(fixed[forms]), differing, loss, columns, levels
            )
            near = 0
            if done + kept.sizes.sum() > most_labels:
                return TOO_MANY, rows
        size = kept.sizes.sum()
        while done + size > rows.shape[1]:
            rows = wider_rows(rows)
        for level in range(len(kept.sizes)):
            for row in range(kept.sizes[level]):
                own = kept.order[level, row]
                rows[0, done], rows[1, done] = kept.rows[0, own], kept.rows[1, own]
                rows[2, done] = cell
                done += 1
        if pairs > most_pairs:
            return TOO_MANY, rows
    return done, rows


@machine_code
def _widest(side: Side) -> int:
    """The most rows of a cell; at least 1."""
    widest = 1
    for cell in range(len(side.start) - 1):
        widest = max(widest, side.start[cell + 1] - side.start[cell])
    return widest


@machine_code
def _differing(a: Side, b: Side, reach: Reach, loss: Loss, columns: Indices) -> Differing:
    """The columns in which two tables differ, and what the others come to."""
    forms, width = reach.weights.shape
    count = len(columns)
    ours, theirs = np.empty((count, len(a.points))), np.empty((count, len(b.points)))
    weights, excess, fixed = np.empty((forms, count)), np.empty(count), np.zeros(forms + 1)
    for c in range(count):
        ours[c] = a.points[:, columns[c]]
        theirs[c] = b.points[:, columns[c]]
        excess[c] = loss.weights[columns[c]]
        for form in range(forms):
            weights[form, c] = reach.weights[form, columns[c]]
    peak = 0.0
    if len(a.points) and len(b.points):
        peak = max(a.points[0, -1], b.points[0, -1])
        for k in range(width - 1):
            if not (columns == k).any():
                own = a.points[0, k] + b.points[0, k]
                for form in range(forms):
                    fixed[form] += own * reach.weights[form, k]
                fixed[forms] += own * loss.weights[k]
    return Differing(ours, theirs, weights, excess, fixed, peak, count > 0 and columns[-1] == width - 1)


@machine_code
def _levels(a: Side, b: Side, reach: Reach, differing: Differing, loss: Loss) -> Values:
    """The values that the peaks of pairs can have, ascending, in steps of the finest range of the grid, where
    two columns differ besides; one where no more than two columns differ; none where there are too many."""
    count = len(differing.ours)
    if count <= _STAIRS:
        return np.zeros(1)
    found, levels = np.empty(_MOST_LEVELS), 0
    if count > _STAIRS + 1 or not differing.is_peak:
        return found[:0]
    for peaks in (differing.ours[-1], differing.theirs[-1], reach.peaks):
        for peak in peaks:
            row = np.searchsorted(found[:levels], peak)
            if row < levels and found[row] == peak:
                continue
            if levels == _MOST_LEVELS:
                return found[:0]
            for at in range(levels, row, -1):
                found[at] = found[at - 1]
            found[row] = peak
            levels += 1
    step = loss.steps[-1]
    if step > 0.0:
        for level in range(levels):
            found[level] /= step
    return found[:levels]


@machine_code
def _meet(
    a: Side, b: Side, choices: int, differing: Differing, reach: Reach, loss: Loss, cell: int, choice: int,
    i: int, fixed: Values, met: Met, near: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Add the pairs of a cell within reach, from row i of a choice on (-1: its first), after so many that are
    near, as long as there is room: where to go on, how many are near then, and how many were looked at.
    `fixed` becomes what columns that do not differ weigh there in each form, with all outside, and what they
    make of the excess."""
    forms, count = differing.weights.shape
    peak = reach.peaks[cell]
    last = count - 1 if differing.is_peak else count
    own_peak = 0.0 if differing.is_peak else max(differing.peak, peak)
    for form in range(forms):
        fixed[form] = reach.outside[cell, form] + differing.fixed[form]
        fixed[form] += own_peak * reach.weights[form, -1]
    fixed[forms] = loss.potential[cell] + differing.fixed[forms] + own_peak * loss.weights[-1]
    outside = reach.outside[cell, 0] if forms else 0.0
    pairs = 0
    while choice < choices:
        at_a, at_b = a.base[cell] + choice * a.stride, b.base[cell] + choice * b.stride
        first, end = b.start[at_b], b.start[at_b + 1]
        stop = a.start[at_a + 1] if first < end else a.start[at_a]
        i = max(i, a.start[at_a])
        while i < stop:
            room = reach.limit - outside - a.sums[i]
            if b.sums[first] > room:
                break
            if near + end - first > len(met.sums):
                return choice, i, near, pairs
            for j in range(first, end):
                if b.sums[j] > room:
                    break
                pairs += 1
                for c in range(last):
                    met.costs[c, near] = differing.ours[c, i] + differing.theirs[c, j]
                if last < count:
                    met.costs[last, near] = max(differing.ours[last, i], differing.theirs[last, j], peak)
                total = 0.0
                for form in range(forms - 1, -1, -1):  # of the first form the sum stays
                    total = fixed[form]
                    for c in range(count):
                        total += differing.weights[form, c] * met.costs[c, near]
                    if not total < reach.limit:
                        break
                if total < reach.limit:
                    met.sums[near], met.rows[0, near], met.rows[1, near] = total, i, j
                    near += 1
            i += 1
        choice, i = choice + 1, -1
    return choice, i, near, pairs


@machine_code
def _taken_in(
    kept: Kept, used: int, met: Met, near: int, fixed: float, differing: Differing, loss: Loss,
    columns: Indices, levels: Values,
) -> tuple[Kept, int]:  # fmt: skip
    """Hold so many pairs that are near against the labels of their cell: these then, and how many were taken
    in. `fixed` is what columns that do not differ make of the excess."""
    if used + near > kept.order.shape[1]:
        kept, used = _with_room(kept, near), kept.sizes.sum()
    _on_grid(met, near, fixed, differing.excess, loss, columns)
    if len(levels):
        used = onto_stairs(kept, used, met, near, levels)
    else:
        used = _into_blocks(kept, kept.sizes[0], met, near)
        kept.sizes[0] = used
    return kept, used


@machine_code
def _met(count: int, size: int) -> Met:
    """Room for so many pairs."""
    width = max(count, _STAIRS)
    costs, tops = np.zeros((width, size)), np.ones((width, size))
    return Met(costs, tops, np.zeros(size), np.zeros(size), np.zeros((2, size), np.intp))


@machine_code
def _on_grid(found: Met, near: int, fixed: float, weights: Values, loss: Loss, columns: Indices) -> None:
    """Of so many pairs the range of the grid; their costs in the steps of the finest, and the tops of where
    they lie on their own: what costs less than that stands for them."""
    places = found.places
    for each in range(near):
        places[each] = 1.0
    if loss.rate > 0.0:
        for each in range(near):
            excess = fixed
            for c in range(len(columns)):
                excess += weights[c] * found.costs[c, each]
            room = (1.0 + loss.rate * excess) / 2.0
            while room >= places[each]:
                places[each] *= 2.0
    for c in range(len(columns)):
        costs, tops, step = found.costs[c], found.tops[c], loss.steps[columns[c]]
        for each in range(near):
            if step > 0.0:
                costs[each] /= step
                tops[each] = (math.floor(costs[each] / places[each]) + 1.0) * places[each]
            else:
                tops[each] = np.nextafter(costs[each], np.inf)


@machine_code
def _room(count: int, levels: int, size: int) -> Kept:
    """For so many labels on so many levels; two columns at least."""
    width = max(count, _STAIRS)
    costs, tops = np.zeros((width, size)), np.ones((width, size))
    ranks, rows = np.empty((2, size)), np.empty((2, size), np.intp)
    order = np.empty((levels, size), np.intp)
    for level in range(levels):
        order[level] = np.arange(size)
    return Kept(costs, tops, ranks, rows, np.empty((levels, 2, size)), order, np.zeros(levels, np.intp))


@machine_code
def _with_room(kept: Kept, wanted: int) -> Kept:
    """The labels that stay, with room for as many more as are wanted, and for yet more."""
    levels = len(kept.sizes)
    found = _room(len(kept.costs), levels, max(2 * (kept.sizes.sum() + wanted), _FEW))
    to = 0
    for level in range(levels):
        for row in range(kept.sizes[level]):
            own = kept.order[level, row]
            for c in range(len(kept.costs)):
                found.costs[c, to], found.tops[c, to] = kept.costs[c, own], kept.tops[c, own]
            for k in range(2):
                found.ranks[k, to], found.rows[k, to] = kept.ranks[k, own], kept.rows[k, own]
                found.stairs[level, k, row] = kept.stairs[level, k, row]
            found.order[level, row] = to
            to += 1
        found.sizes[level] = kept.sizes[level]
    return found


@machine_code
def _into_blocks(kept: Kept, size: int, found: Met, near: int) -> int:
    """Take in so many pairs where more columns differ; how many labels there are then."""
    costs, tops, ranks = kept.costs, kept.tops, kept.ranks
    cost, top = np.empty(len(costs)), np.empty(len(costs))
    for each in range(near):
        for c in range(len(costs)):
            cost[c], top[c] = found.costs[c, each], found.tops[c, each]
        place, rank = found.places[each], found.sums[each]
        row = _next_below(costs, ranks, top, place, NONE, size)
        while row >= 0 and ranks[0, row] == place and rank < ranks[1, row]:
            if not _is_below(cost, tops, row):
                break
            row = _next_below(costs, ranks, top, place, row + 1, size)  # it is the better of both
        if row >= 0:
            _swap(kept, row, row // 2)  # what stands for many is met sooner the next time
            continue
        row = _next_above(cost, place, tops, ranks, NONE, size)
        while row >= 0:  # the last takes the place of what falls
            size -= 1
            _swap(kept, row, size)
            row = _next_above(cost, place, tops, ranks, row, size)
        for c in range(len(cost)):
            costs[c, size], tops[c, size] = cost[c], top[c]
        ranks[0, size], ranks[1, size] = place, rank
        kept.rows[0, size], kept.rows[1, size] = found.rows[0, each], found.rows[1, each]
        size += 1
    return size


@machine_code
def _is_below(cost: Values, tops: Values, row: int) -> bool:
    """Whether a label costs less than the tops of one in every column."""
    is_below = True
    for c in range(len(cost)):
        is_below &= cost[c] < tops[c, row]
    return is_below


@machine_code
def _next_below(costs: Values, ranks: Values, top: Values, place: float, first: int, size: int) -> int:
    """The first of `size` labels, from one on, that is in no coarser range than `place` and below `top` in
    every column; -1 where none is. Blocks are compared without a branch, several labels at a time."""
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


@machine_code
def _next_above(cost: Values, place: float, tops: Values, ranks: Values, first: int, size: int) -> int:
    """The first of `size` labels, from one on, that is in no finer range than `place` and whose tops are all
    above `cost`; -1 where none is."""
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


@machine_code
def _swap(kept: Kept, one: int, other: int) -> None:
    """Put two labels of a cell in each other's place."""
    for c in range(len(kept.costs)):
        kept.costs[c, one], kept.costs[c, other] = kept.costs[c, other], kept.costs[c, one]
        kept.tops[c, one], kept.tops[c, other] = kept.tops[c, other], kept.tops[c, one]
    for k in range(2):
        kept.ranks[k, one], kept.ranks[k, other] = kept.ranks[k, other], kept.ranks[k, one]
        kept.rows[k, one], kept.rows[k, other] = kept.rows[k, other], kept.rows[k, one]
