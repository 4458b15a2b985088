"""Joins of labels in compiled loops: what they are given, the terminal join, and completions.

`side_of` prepares a table. `terminal_pairs` joins where prefix and suffix meet, `number_of_pairs` counts
pairs, and `are_within` and `are_within_both` match labels with completions.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto.compilation import numba_compiled

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
"""(3, n): rows of one table, rows of the other, and cells."""

NONE = cast(int, np.intp(0))
"""0 in the integer type of the loops: a literal has a type of its own, for which a function would be compiled
once more."""

TOO_MANY = -1
"""Number of rows returned if a limit is exceeded."""

_FEW = 1024
"""Initial capacity for rows."""


class Side(NamedTuple):
    """One of two tables that are joined. The rows of cell c are start[c] to start[c + 1], by ascending
    weighted `sums`. For choice v of the eliminated variable, joint cell j needs this table's cell base[j] + v
    * stride."""

    points: Values
    sums: Values
    start: Indices
    base: Indices
    stride: int


PreparedSide = tuple[Side, Values, Indices]
"""A table, the columns in which its labels differ, and the order of its rows."""


class PruningArrays(NamedTuple):
    """Pruning of pairs: the costs under `weights` (multipliers, columns) plus `outside` (cells, multipliers)
    must be below `limit` under each multiplier. A peak counts as at least `peaks` (cells)."""

    weights: Values
    outside: Values
    limit: float
    peaks: Values


class DominanceArrays(NamedTuple):
    """Epsilon-dominance: `steps` (columns), 0 where there is no tolerance, and their growth `rate` with the
    excess: the costs under `weights` (columns) plus `potential` (cells)."""

    steps: Values
    rate: float
    weights: Values
    potential: Values


@numba_compiled
def whole_numbers(size: int, value: int) -> Indices:
    """An array of equal numbers. Each NumPy function that loops call is compiled too, so that they call only
    `np.empty`, this one and `fractions`."""
    found = np.empty(size, np.intp)
    for k in range(size):
        found[k] = value
    return found


@numba_compiled
def fractions(size: int, value: float) -> Values:
    """An array of equal numbers."""
    found = np.empty(size)
    for k in range(size):
        found[k] = value
    return found


@numba_compiled
def _ascending(values: Values) -> Indices:
    """The order of ascending values, of equal ones the first (merge sort)."""
    count = len(values)
    order, spare = np.empty(count, np.intp), np.empty(count, np.intp)
    for row in range(count):
        order[row] = row
    length = NONE + 1
    while length < count:
        for start in range(0, count, 2 * length):
            one, middle = start, min(start + length, count)
            other, stop = middle, min(start + 2 * length, count)
            for to in range(start, stop):
                if one < middle and (other >= stop or values[order[one]] <= values[order[other]]):
                    spare[to] = order[one]
                    one += 1
                else:
                    spare[to] = order[other]
                    other += 1
        order, spare = spare, order
        length *= 2
    return order


@numba_compiled
def side_of(
    points: Values, cells: Indices, weights: Values, sizes: Indices, axes: Indices, left: Indices
) -> PreparedSide:
    """A table prepared for the loops: rows by ascending cell, then by sum under `weights` (columns); the
    columns in which they differ; and their order.

    Variable v of the table, of sizes[v] choices, is axis axes[v] of the joint cells, of sizes `left`, or -1
    if it is eliminated.
    """
    count, width = points.shape
    strides = whole_numbers(len(left), NONE)
    stride, taken = 1, 0
    for variable in range(len(sizes) - 1, -1, -1):
        if axes[variable] >= 0:
            strides[axes[variable]] = stride
        else:
            taken = stride
        stride *= sizes[variable]
    sums, differs = fractions(count, 0.0), fractions(width, 0.0)
    for row in range(count):
        for k in range(width):
            sums[row] += points[row, k] * weights[k]
            if points[row, k] != points[0, k]:
                differs[k] = 1.0
    start = whole_numbers(stride + 1, NONE)
    for row in range(count):
        start[cells[row] + 1] += 1
    for cell in range(stride):
        start[cell + 1] += start[cell]
    by_sum = _ascending(sums)
    remaining = np.empty(stride, np.intp)
    for cell in range(stride):
        remaining[cell] = start[cell]
    order = np.empty(count, np.intp)
    for row in by_sum:
        order[remaining[cells[row]]] = row
        remaining[cells[row]] += 1
    ordered, ordered_sums = np.empty((count, width)), np.empty(count)
    for row in range(count):
        ordered_sums[row] = sums[order[row]]
        for k in range(width):
            ordered[row, k] = points[order[row], k]
    total = 1
    for axis in range(len(left)):
        total *= left[axis]
    base = whole_numbers(total, NONE)
    for cell in range(total):
        rest = cell
        for axis in range(len(left) - 1, -1, -1):
            base[cell] += rest % left[axis] * strides[axis]
            rest //= left[axis]
    return Side(ordered, ordered_sums, start, base, taken), differs, order


@numba_compiled
def terminal_pairs(
    a: Side, b: Side, choices: int, pruning: PruningArrays, slack: Values, most_pairs: int
) -> tuple[int, int, Rows]:
    """Terminal join: pairs of rows in folded columns that no other pair, in any cell, dominates in seconds
    and bytes, up to a `slack` of both. Returns their number (TOO_MANY if a limit is exceeded), the pairs
    compared, and of each its rows in both tables and its cell, by ascending seconds."""
    multipliers, width = pruning.weights.shape
    found = np.empty((2, _FEW))  # seconds and bytes
    rows = np.empty((3, _FEW), np.intp)
    point = np.empty(width)
    count = 0
    pairs = 0
    for cell in range(len(a.base)):
        outside = pruning.outside[cell, 0] if multipliers else 0.0
        if multipliers and not outside < pruning.limit:
            continue
        for choice in range(choices):
            at_a = a.base[cell] + choice * a.stride
            at_b = b.base[cell] + choice * b.stride
            first, end = b.start[at_b], b.start[at_b + 1]
            if first == end:
                continue
            for i in range(a.start[at_a], a.start[at_a + 1]):
                remaining = pruning.limit - outside - a.sums[i]
                if b.sums[first] > remaining:
                    break
                for j in range(first, end):
                    if b.sums[j] > remaining:
                        break
                    pairs += 1
                    if pairs > most_pairs:
                        return TOO_MANY, pairs, rows
                    for k in range(width - 1):
                        point[k] = a.points[i, k] + b.points[j, k]
                    point[3] = max(max(a.points[i, 3], b.points[j, 3]), pruning.peaks[cell])
                    time = max(point[0], point[1])
                    memory = point[2] + point[3]
                    low, high = 0, count  # the first one slower than the time plus slack
                    while low < high:
                        middle = (low + high) // 2
                        if found[0, middle] <= time + slack[0]:
                            low = middle + 1
                        else:
                            high = middle
                    if low > 0 and found[1, low - 1] <= memory + slack[1]:
                        continue
                    if _sum_within(point, cell, pruning) == np.inf:
                        continue
                    start = low
                    while start > 0 and found[0, start - 1] >= time:
                        start -= 1
                    stop = start
                    while stop < count and found[1, stop] >= memory:
                        stop += 1
                    if count == rows.shape[1]:
                        found, rows = wider(found), wider_rows(rows)
                    shift = start + 1 - stop
                    for at in range(stop, count):
                        row = at if shift < 0 else count - 1 + stop - at
                        for k in range(2):
                            found[k, row + shift] = found[k, row]
                        for k in range(3):
                            rows[k, row + shift] = rows[k, row]
                    count += shift
                    found[0, start], found[1, start] = time, memory
                    rows[0, start], rows[1, start], rows[2, start] = i, j, cell
    return count, pairs, rows


@numba_compiled
def number_of_pairs(a: Side, b: Side, choices: int, pruning: PruningArrays, enough: int) -> int:
    """Number of pairs of rows to compare; `enough` if there are at least that many."""
    multipliers = pruning.weights.shape[0]
    pairs = 0
    for cell in range(len(a.base)):
        outside = pruning.outside[cell, 0] if multipliers else 0.0
        if multipliers and not outside < pruning.limit:
            continue
        for choice in range(choices):
            at_a = a.base[cell] + choice * a.stride
            at_b = b.base[cell] + choice * b.stride
            first, end = b.start[at_b], b.start[at_b + 1]
            for i in range(a.start[at_a], a.start[at_a + 1]):
                remaining = pruning.limit - outside - a.sums[i]
                low, high = first, end  # the first one above the limit
                while low < high:
                    middle = (low + high) // 2
                    if b.sums[middle] <= remaining:
                        low = middle + 1
                    else:
                        high = middle
                if low == first:
                    break
                pairs += low - first
                if pairs >= enough:
                    return enough
    return pairs


@numba_compiled
def _sum_within(point: Values, cell: int, pruning: PruningArrays) -> float:
    """The weighted sum of a pair with the least outside, under the first multipliers; infinite if the sum
    under any multipliers is not below the limit."""
    multipliers, width = pruning.weights.shape
    first = 0.0
    for multiplier in range(multipliers):
        total = pruning.outside[cell, multiplier]
        for k in range(width):
            total += point[k] * pruning.weights[multiplier, k]
        if not total < pruning.limit:
            return np.inf
        if multiplier == 0:
            first = total
    return first


@numba_compiled
def wider(values: Values) -> Values:
    found = np.empty((values.shape[0], 2 * values.shape[1]))
    for k in range(values.shape[0]):
        for row in range(values.shape[1]):
            found[k, row] = values[k, row]
    return found


@numba_compiled
def wider_rows(values: Rows) -> Rows:
    found = np.empty((values.shape[0], 2 * values.shape[1]), np.intp)
    for k in range(values.shape[0]):
        for row in range(values.shape[1]):
            found[k, row] = values[k, row]
    return found


Mask = npt.NDArray[np.bool_]


@numba_compiled
def are_within(own: Values, at: Indices, completions: Values, places: Indices, cutoff: float) -> Mask:
    """Which rows (n, 3) of two times and a peak, all in seconds, are below `cutoff` with any of the
    completions places[at] to places[at + 1]."""
    found = np.zeros(len(own), np.bool_)
    for row in range(len(own)):
        for rest in range(places[at[row]], places[at[row] + 1]):
            time_s = max(own[row, 0] + completions[rest, 0], own[row, 1] + completions[rest, 1])
            if time_s + max(own[row, 2], completions[rest, 2]) < cutoff:
                found[row] = True
                break
    return found


@numba_compiled
def are_within_both(
    own: Values, at: Indices, completions: Values, places: Indices, beyond: Indices, others: Values,
    other_starts: Indices,
    share: float, cutoff: float,
) -> Mask:  # fmt: skip
    """Which rows are below `cutoff` with any completion places[at] to places[at + 1] and any of `others` from
    other_starts[beyond] to other_starts[beyond + 1].

    Both are sorted by a weighted sum of both times, `share` for the first. This mean is a lower bound of the
    larger time, so the inner loop can stop early.
    """
    found = np.zeros(len(own), np.bool_)
    for row in range(len(own)):
        first, last = other_starts[beyond[row]], other_starts[beyond[row] + 1]
        for rest in range(places[at[row]], places[at[row] + 1]):
            one, two = own[row, 0] + completions[rest, 0], own[row, 1] + completions[rest, 1]
            peak = max(own[row, 2], completions[rest, 2])
            mean = share * one + (1.0 - share) * two + peak
            for other in range(first, last):
                a, b = others[other, 0], others[other, 1]
                if mean + share * a + (1.0 - share) * b >= cutoff:
                    break
                if max(one + a, two + b) + max(peak, others[other, 2]) < cutoff:
                    found[row] = True
                    break
            if found[row]:
                break
    return found
