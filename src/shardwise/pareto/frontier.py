"""Pareto frontiers: dominance filter, union, product and knee; every point remembers its origin.

`union` is a choice between frontiers, `product` their composition (sums of points). Both are commutative and
associative, and product distributes over union (as sets of points; floating-point sums to rounding). The
empty frontier is neutral for union, the single point 0 for product.

`non_dominated` filters one set of points or many groups at once, exactly or up to a relative epsilon. `knee`
finds the point of a frontier of time and memory that is worth most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import InternalError
from shardwise.ties import ROUNDING, first_least

Points = npt.NDArray[np.float64]
"""(n, k): n points of k objectives, all minimised."""

Indices = npt.NDArray[np.intp]

MEMORY_WORTH = 0.2
"""What the whole memory of a device is worth, as a share of the step time of the fastest point: 1 % of step
time has to free 5 % of the memory. Half of the memory is then worth 10 % of the time, half of what devices
with half of the memory cost less (list prices of A100 and V100: 20 % and 22 %), since memory of a device that
is there already costs nothing."""

_BLOCK = 256
"""Block size, points: rows compared at once where there are four objectives or more. The masks of a block
then fit in the cache."""

_FIRST, _FURTHER = 128, 4
"""Rows that a block is compared with first, and the factor by which that number grows each time. The first
few rows dominate most others."""


def knee(points: npt.NDArray[Any], capacity: float) -> int | None:
    """Index of the knee among `points` (n, 2), or None where no point is worth more than the first.

    The points are non-dominated, positive, and ascend in the first objective, time; the second is memory, and
    `capacity` is the memory of the device in the same unit. The knee has the least sum of time over that of
    the first point and MEMORY_WORTH times memory over capacity; of equal points it is the first. So from the
    first point to the knee each percent of time frees at least 5 % of the device's memory, and from the knee
    to any slower point less.
    """
    if len(points) < 2:
        return None
    rows = np.asarray(points, dtype=np.float64)
    place = int(first_least(rows[:, 0] / rows[0, 0] + MEMORY_WORTH / capacity * rows[:, 1]))
    return place or None


def non_dominated(
    points: npt.NDArray[Any], *, groups: Indices | None = None, epsilon: float = 0.0
) -> Indices:
    """Indices of the non-dominated rows of `points` (n, k), in lexicographic order of the points.

    A row is dominated where another row is no larger in every objective and smaller in one. Of equal rows the
    first stays. With `groups` (n), rows are compared only within their group, and come group by group. With
    `epsilon` > 0 (two or more objectives of one set) more rows are dropped: for every row p some row q stays
    with q <= (1 + epsilon) p in every objective, and the smallest value of each objective stays exactly.
    Raises InternalError for NaN, and for negative objectives with an epsilon.
    """
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] < 1:
        raise InternalError(f"a frontier has objectives in columns, not an array of shape {points.shape}")
    if np.isnan(points).any():
        raise InternalError("a frontier cannot order NaN")
    if groups is None:
        groups = np.zeros(len(points), dtype=np.intp)
    order = np.lexsort((*points.T[::-1], groups))
    ordered, group = points[order], groups[order]
    selected = _undominated(ordered, group)
    if epsilon > 0.0:
        selected = selected[_representatives(ordered[selected], epsilon)]
    return order[selected]


def _undominated(ordered: Points, group: Indices) -> Indices:
    """Rows that no earlier row of their group dominates or equals; rows are in lexicographic order within
    groups.

    A dominating row comes before the rows that it dominates. So each row is first compared with the earlier
    rows that are best in one objective. This settles nearly all rows, and all of them where there are two
    objectives.
    """
    varying = [column for column in ordered.T if (column != column[:1]).any()]
    if not varying:
        return _firsts(group)
    ranks = np.column_stack([_ranked_in_order(varying[0], group), *(_ranked(own) for own in varying[1:])])
    rows = np.arange(len(ranks), dtype=np.intp)
    for _ in range(2):
        left = ~_is_matched_by_best(ranks, group)
        if left.all():
            break
        rows, ranks, group = rows[left], ranks[left], group[left]
    if len(varying) <= 2:
        return rows
    if len(varying) == 3:
        return rows[_swept(ranks, group)]
    return rows[_compared(ranks, group)]


def _ranked(column: npt.NDArray[np.float64]) -> Indices:
    """The rank of each value among the distinct values: integers that compare as the values do."""
    order = np.argsort(column, kind="stable")
    is_larger = np.zeros(len(column), dtype=np.intp)
    is_larger[1:] = column[order[1:]] > column[order[:-1]]
    ranks = np.empty(len(column), dtype=np.intp)
    ranks[order] = np.cumsum(is_larger)
    return ranks


def _ranked_in_order(column: npt.NDArray[np.float64], group: Indices) -> Indices:
    """The same for a column that ascends within each group; ranks compare only within a group."""
    is_larger = np.zeros(len(column), dtype=np.intp)
    is_larger[1:] = column[1:] != column[:-1]
    ranks = np.cumsum(is_larger)
    starts = np.flatnonzero(_is_start(group))
    return np.asarray(ranks - np.repeat(ranks[starts], np.diff(starts, append=len(column))))


def _firsts(group: Indices) -> Indices:
    """The first row of each group."""
    is_first = np.ones(len(group), dtype=bool)
    is_first[1:] = group[1:] != group[:-1]
    return np.flatnonzero(is_first)


def _is_matched_by_best(ranks: Indices, group: Indices) -> npt.NDArray[np.bool_]:
    """Whether the earlier row of the group that is best in one objective is no larger in all objectives.

    For the first objective, in which rows are sorted, that is the first row of the group.
    """
    count, objectives = ranks.shape
    starts = np.maximum.accumulate(np.where(_is_start(group), np.arange(count), 0))
    is_matched = np.zeros(count, dtype=bool)
    for objective in range(1 if objectives > 1 else 0, objectives):
        best = _best_before(ranks[:, objective], group, starts)
        is_before = best < np.arange(count)
        for own in ranks.T[1:]:  # the first objective is sorted: earlier rows are no larger in it
            is_before &= own[best] <= own
        is_matched |= is_before
    return is_matched


def _is_start(group: Indices) -> npt.NDArray[np.bool_]:
    is_start = np.ones(len(group), dtype=bool)
    is_start[1:] = group[1:] != group[:-1]
    return is_start


def _best_before(rank: Indices, group: Indices, starts: Indices) -> Indices:
    """For each row, the first earlier row of its group with the smallest value; the row itself where it is
    the first of its group."""
    count = len(rank)
    # The keys of each group are all below those of the group before it.
    ordinal = np.cumsum(_is_start(group)) - 1
    key = rank - ordinal * (int(rank.max(initial=0)) + 1)
    lowest = np.minimum.accumulate(key)
    is_new = np.ones(count, dtype=bool)
    is_new[1:] = lowest[1:] < lowest[:-1]
    holder = np.maximum.accumulate(np.where(is_new, np.arange(count), 0))
    before = np.empty(count, dtype=np.intp)
    before[:1] = 0
    before[1:] = holder[:-1]
    return np.where(np.arange(count) == starts, starts, np.maximum(before, starts))


def _swept(ranks: Indices, group: Indices) -> Indices:
    """Non-dominated rows of three objectives.

    A sweep along the first objective maintains the frontier of the other two over the earlier rows of the
    group: `ys` ascending, `zs` descending. A row is dominated where the last frontier point at or before its
    y has no larger z.
    """
    ys: list[int] = []
    zs: list[int] = []
    selected: list[int] = []
    now = -1
    rows = zip(group.tolist(), ranks[:, 1].tolist(), ranks[:, 2].tolist(), strict=True)
    for row, (own, y, z) in enumerate(rows):
        if own != now:
            now, ys, zs = own, [], []
        step = bisect_right(ys, y)
        if step and zs[step - 1] <= z:
            continue
        selected.append(row)
        start = bisect_left(ys, y, 0, step)
        end = start
        while end < len(zs) and zs[end] >= z:
            end += 1
        ys[start:end] = [y]
        zs[start:end] = [z]
    return np.asarray(selected, dtype=np.intp)


def _compared(ranks: Indices, group: Indices) -> Indices:
    """Non-dominated rows of any number of objectives.

    Rows are processed group by group in ascending sum of their ranks. A dominating row has no larger sum, so
    the first rows of a group eliminate most others. Each block is compared with the earlier rows that remain,
    a few at first, then within itself. Ranks are stored in the shortest integer type that holds them.
    """
    order = np.lexsort((ranks.sum(axis=1), group))
    short = np.int16 if ranks.max(initial=0) <= np.iinfo(np.int16).max else np.int32
    columns = np.ascontiguousarray(ranks[order].T.astype(short))
    group = (np.cumsum(_is_start(group)) - 1)[order]
    own = np.empty_like(columns)  # ranks of the rows that remain
    selected = np.empty(len(order), dtype=np.intp)
    count = first = 0
    for start in range(0, len(order), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(order)))
        first += int(np.searchsorted(group[selected[first:count]], group[start]))
        low, width = first, _FIRST
        while low < count and len(rows):
            high = min(low + width, count)
            is_below = _is_below(own[:, low:high], group[selected[low:high]], columns[:, rows], group[rows])
            rows = rows[~is_below.any(axis=0)]
            low, width = high, width * _FURTHER
        is_below = _is_below(columns[:, rows], group[rows], columns[:, rows], group[rows])
        rows = rows[~np.triu(is_below, 1).any(axis=0)]
        selected[count : count + len(rows)] = rows
        own[:, count : count + len(rows)] = columns[:, rows]
        count += len(rows)
    return np.sort(order[selected[:count]])


def _is_below(
    others: npt.NDArray[Any], group_of_others: Indices, columns: npt.NDArray[Any], group: Indices
) -> npt.NDArray[np.bool_]:
    """(m, n): whether an `others` row (objectives, m) is no larger in any objective than a row of
    `columns` (objectives, n) of its group."""
    is_below = others[0][:, None] <= columns[0][None]
    for theirs, own in zip(others[1:], columns[1:], strict=True):
        is_below &= theirs[:, None] <= own[None]
    if len(group) and len(group_of_others) and group_of_others[0] != group[-1]:
        is_below &= group_of_others[:, None] == group[None]
    return np.asarray(is_below)


def _representatives(frontier: Points, epsilon: float) -> Indices:
    """The first point in each box of a grid with boxes a factor 1 + epsilon wide, and each minimum."""
    if (frontier < 0.0).any():
        raise InternalError("a relative epsilon needs objectives that are not negative")
    # Slightly narrower than epsilon, so that rounding in the logarithm cannot widen a box beyond it.
    width = np.log1p(epsilon) * (1.0 - ROUNDING)
    with np.errstate(divide="ignore"):
        groups = np.floor(np.log(frontier) / width)
    _, first = np.unique(groups, axis=0, return_index=True)
    return np.unique(np.concatenate([first, np.argmin(frontier, axis=0)])) if len(frontier) else first


_PAIRS_AT_ONCE = 1 << 22
"""Pairs of points that a product holds in memory at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Non-dominated points and their origins.

    `points` (n, k) float64, in lexicographic order, k = 2 or 3 objectives, all minimised. `choice` (n, 2)
    says where point i comes from: (0, row) for `frontier_of`, (operand, point) for a union, (point of a,
    point of b) for a product.
    """

    points: Points
    choice: Indices

    def __len__(self) -> int:
        return len(self.points)


def frontier_of(points: npt.NDArray[Any] | Sequence[Sequence[float]], *, epsilon: float = 0.0) -> Frontier:
    """The frontier of the rows of `points` (n, k), filtered by `non_dominated`."""
    rows = np.asarray(points, dtype=np.float64)
    selected = non_dominated(rows, epsilon=epsilon)
    return Frontier(rows[selected], np.column_stack([np.zeros_like(selected), selected]))


def union(a: Frontier, b: Frontier, *, epsilon: float = 0.0) -> Frontier:
    """Points that a choice between `a` and `b` can reach; of equal points that of `a` stays."""
    return union_all([a, b], epsilon=epsilon)


def union_all(frontiers: Sequence[Frontier], *, epsilon: float = 0.0) -> Frontier:
    """Points that a choice among all `frontiers` can reach; of equal points that of the first stays."""
    if not frontiers:
        raise InternalError("the union of no frontiers has no number of objectives")
    operands = np.repeat(np.arange(len(frontiers)), [len(frontier) for frontier in frontiers])
    places = np.concatenate([np.arange(len(frontier)) for frontier in frontiers])
    points = np.concatenate([frontier.points for frontier in frontiers])
    selected = non_dominated(points, epsilon=epsilon)
    return Frontier(points[selected], np.column_stack([operands[selected], places[selected]]))


def product(a: Frontier, b: Frontier, *, epsilon: float = 0.0) -> Frontier:
    """Non-dominated sums of a point of `a` and a point of `b`; of equal sums the first pair stays.

    Each call adds one factor 1 + epsilon. After d nested calls on objectives that are not negative, every
    exact point p has a remaining q <= (1 + epsilon)^d p.
    """
    rows = max(1, _PAIRS_AT_ONCE // max(1, len(b)))
    parts = [_block_product(a, b, start, start + rows) for start in range(0, len(a), rows)]
    points = np.concatenate([part.points for part in parts]) if parts else a.points
    choice = np.concatenate([part.choice for part in parts]) if parts else a.choice
    selected = non_dominated(points, epsilon=epsilon)
    return Frontier(points[selected], choice[selected])


def _block_product(a: Frontier, b: Frontier, start: int, stop: int) -> Frontier:
    """The exact product of points `start` to `stop` (or the end) of `a` with all of `b`."""
    sums = (a.points[start:stop, None, :] + b.points[None, :, :]).reshape(-1, a.points.shape[1])
    selected = non_dominated(sums)
    return Frontier(sums[selected], np.column_stack([selected // len(b) + start, selected % len(b)]))
