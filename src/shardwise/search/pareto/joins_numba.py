"""The loops of frontier tracking as machine code: needs numba (`pip install 'shardwise[fast]'`).

Each function does what its module does in numpy where numba is not installed. Compiled once, then kept beside
this file, or where the user's caches are.

Which labels some rest completes, as machine code: what `completions` does in numpy where numba is not
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
"""(3, n): rows of one table and of the other, and cells."""

Function = TypeVar("Function", bound=Callable[..., Any])

NONE = cast(int, np.intp(0))
"""0 as loops count: a literal is a type of its own, for which a function would be compiled once more."""

TOO_MANY = -1
"""Rows found, where there are more than may be gone through."""

_FEW = 1024
"""Rows that there is room for at first."""


def discard_stale_caches(folder: Path) -> None:
    """Remove compiled functions of `folder` that are older than one of its modules: numba compares a function
    with its own file alone, not with those of the functions and types that it uses."""
    newest_s = max((path.stat().st_mtime for path in folder.glob("*.py")), default=0.0)
    for pattern in ("*.nbi", "*.nbc"):
        for path in folder.glob(f"__pycache__/{pattern}"):
            with suppress(OSError):  # another process was faster, or the folder cannot be written to
                if path.stat().st_mtime < newest_s:
                    path.unlink()


discard_stale_caches(Path(__file__).parent)


def numba_compiled(function: Function) -> Function:
    """As machine code, kept for the next process where there is a place for it."""
    fast = {"nnan", "nsz"}  # nothing here is ever NaN
    found: Any
    try:
        found = numba.njit(cache=True, error_model="numpy", fastmath=fast)(function)
    except RuntimeError:  # no folder can be written to
        found = numba.njit(error_model="numpy", fastmath=fast)(function)
    return cast(Function, found)


class Side(NamedTuple):
    """One of two tables that meet. Rows of cell c are from start[c] to start[c + 1], by ascending weighted
    `sums`; the cell that goes into cell j of both, for choice v of what is taken out, is base[j] + v stride.
    """

    points: Values
    sums: Values
    start: Indices
    base: Indices
    stride: int


PreparedSide = tuple[Side, Values, Indices]
"""One of them, in which columns its labels differ, and their order."""


class PruningArrays(NamedTuple):
    """Pairs that may matter: whose `weights` (forms, columns) of the costs and `outside` (cells, forms) are
    below `limit` in each form. A peak is at least that of `peaks` (cells)."""

    weights: Values
    outside: Values
    limit: float
    peaks: Values


class DominanceArrays(NamedTuple):
    """The grid of labels: `steps` (columns), 0 where nothing is lost, and how they grow with the excess, that
    is `weights` (columns) of the costs and `potential` (cells)."""

    steps: Values
    rate: float
    weights: Values
    potential: Values


@numba_compiled
def side_of(
    points: Values, cells: Indices, weights: Values, sizes: Indices, axes: Indices, left: Indices
) -> PreparedSide:
    """A table as the loops take it, its rows by cell, which ascend, and then by sum under `weights`
    (columns); in which columns they differ; and their order.

    Variable v of the table, of sizes[v] choices, is axis axes[v] of the joint cells, of sizes `left`, or -1
    where it is taken out."""
    count, width = points.shape
    strides = np.zeros(len(left), np.intp)
    stride, taken = 1, 0
    for variable in range(len(sizes) - 1, -1, -1):
        if axes[variable] >= 0:
            strides[axes[variable]] = stride
        else:
            taken = stride
        stride *= sizes[variable]
    sums, differs = np.zeros(count), np.zeros(width)
    for row in range(count):
        for k in range(width):
            sums[row] += points[row, k] * weights[k]
            if points[row, k] != points[0, k]:
                differs[k] = 1.0
    start = np.zeros(stride + 1, np.intp)
    for row in range(count):
        start[cells[row] + 1] += 1
    for cell in range(stride):
        start[cell + 1] += start[cell]
    by_sum = np.argsort(sums, kind="mergesort")
    remaining = start[:-1].copy()
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
    base = np.zeros(total, np.intp)
    for cell in range(total):
        rest = cell
        for axis in range(len(left) - 1, -1, -1):
            base[cell] += rest % left[axis] * strides[axis]
            rest //= left[axis]
    return Side(ordered, ordered_sums, start, base, taken), differs, order


@numba_compiled
def terminal_pairs(
    a: Side, b: Side, choices: int, pruning: PruningArrays, slack: Values, most_pairs: int
) -> tuple[int, Rows]:
    """Pairs of rows with folded columns that no other pair, whatever its cell, is below in seconds and bytes,
    up to a `slack` of both: as `labels_of_pairs`, by ascending seconds."""
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
                        return TOO_MANY, rows
                    for k in range(width - 1):
                        point[k] = a.points[i, k] + b.points[j, k]
                    point[3] = max(a.points[i, 3], b.points[j, 3], pruning.peaks[cell])
                    time = max(point[0], point[1])
                    memory = point[2] + point[3]
                    low, high = 0, count  # the first that takes longer than may stand for it
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
    return count, rows


@numba_compiled
def number_of_pairs(a: Side, b: Side, choices: int, pruning: PruningArrays, enough: int) -> int:
    """How many pairs of rows there are to look at; `enough` where there are no fewer."""
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
                low, high = first, end  # the first that is too much
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
    """The weighted sum of costs with what is outside, in the first form; infinite where that of any form is
    not below the limit."""
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
    """Which rows (n, 3) of two times and a peak, all in seconds, come to less than `cutoff` with any of the
    rests from places[at] to places[at + 1]."""
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
    """Which rows come to less than `cutoff` with any of the rests from places[at] to places[at + 1] and any
    of the others from ends[beyond] to ends[beyond + 1]; both by ascending sum of both times, of which the
    first has this share: no less than that is the larger of them."""
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
