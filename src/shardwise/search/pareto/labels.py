"""Tables of labels and their joins: for each choice of a table's variables, the non-dominated costs of what
it covers.

`joined` is the join of two tables, with pruning, epsilon-dominance and limits. `chosen` goes back from labels
to the choices they were made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Costs, non_dominated
from shardwise.search.pareto import numba_dispatch, tuning
from shardwise.search.pareto.bound_sets import SLACK
from shardwise.search.pareto.dominance import EpsilonDominance, reduced, undominated_in_bins
from shardwise.search.pareto.solution import measures

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_PAIRS_AT_ONCE = 1 << 21
"""Pairs of labels of a join in memory at a time."""


class TooManyLabels(Exception):
    """A join would exceed its limits of pairs or labels."""


@dataclass(slots=True)
class Allowance:
    """Limits for joins without bounds: `pairs` of labels in all joins, `at_once` compared at a time, and
    `labels` in a table."""

    pairs: int
    labels: int
    at_once: int

    def take(self, pairs: int) -> None:
        """Use up the pairs of one join; TooManyLabels if fewer are left."""
        self.pairs -= pairs
        if self.pairs < 0:
            raise TooManyLabels


@dataclass(frozen=True, slots=True, eq=False)
class LabelPruning:
    """Which labels of a join are needed: those whose weighted sum, plus the least cost of the rest, is below
    `limit` under each of J multipliers.

    `weights_a` and `weights_b` (columns, J) weigh the two tables. `weights` weigh the joint costs, with at
    least the sum of both. `outside` (choices of each remaining variable..., J) is the least cost of the rest.
    `peaks` (choices...) is the least peak of the rest: a label's own peak counts as at least that, since a
    smaller one makes no difference.
    """

    weights_a: Values
    weights_b: Values
    weights: Values
    outside: Values
    limit: float
    peaks: Values | None = None

    @property
    def padded_limit(self) -> float:
        """The limit with a margin for rounding, since sums are added in any order."""
        return self.limit * (1.0 + SLACK)

    def of(self, cells: Indices, points: Values) -> tuple[Indices, Values]:
        """The rows of needed labels, and their sums under the first multipliers, which prune most labels."""
        outside = self.outside.reshape(-1, self.weights.shape[1])
        ranks = points @ self.weights[:, 0] + outside[cells, 0]
        retained = np.flatnonzero(ranks < self.padded_limit)
        if self.weights.shape[1] > 1:
            sums = points[retained] @ self.weights[:, 1:] + outside[cells[retained], 1:]
            retained = retained[(sums < self.padded_limit).all(axis=1)]
        return retained, ranks[retained]


@dataclass(frozen=True, slots=True, eq=False)
class TerminalJoin:
    """Join where prefix and suffix meet: labels are compared by seconds and bytes only.

    A label that stands for another may cost up to `slack` (2) more. `pairs` may be compared, if that is more
    than for other joins.
    """

    slack: Values | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A table of labels: a frontier for each cell.

    A cell is a choice of each of `variables` (of `sizes`): the flat index, the last variable fastest. `cells`
    (n) ascend; label i costs points[i] of `points` (n, columns). `origins` are the tables it was made of with
    the rows in each; empty for given costs. With `names` it is the single origin with its variables renamed.
    """

    variables: tuple[int, ...]
    sizes: tuple[int, ...]
    cells: Indices
    points: Values
    origins: tuple[tuple[Labels, Indices], ...] = ()
    names: Mapping[int, int] | None = None

    def __len__(self) -> int:
        return len(self.cells)

    def coordinates(self, rows: Any = slice(None)) -> dict[int, Indices]:
        """The choice of each variable, for each label."""
        if not self.variables:
            return {}
        return dict(zip(self.variables, np.unravel_index(self.cells[rows], self.sizes), strict=True))

    def renamed(self, names: Mapping[int, int]) -> Labels:
        """The same labels with other names of the variables, those of the origins too."""
        variables = tuple(names[variable] for variable in self.variables)
        return replace(self, variables=variables, origins=((self, np.arange(len(self))),), names=names)


def labels_of(variables: tuple[int, ...], costs: Costs) -> Labels:
    """One label per finite cost of a factor."""
    sizes = costs.shape[:-1]
    points = costs.reshape(-1, costs.shape[-1])
    cells = np.flatnonzero(np.isfinite(points).all(axis=1))
    return Labels(variables, sizes, cells, points[cells])


def pairs_of(a: Labels, b: Labels, *, without: int | None, pruning: LabelPruning) -> int:
    """Number of pairs of labels that a join compares."""
    left, sizes = _left(a, b, without)
    if numba_dispatch.uses_numba(len(a) * len(b)):
        return numba_dispatch.NumbaJoin(a, b, left, sizes, without, pruning).count(len(a) * len(b))
    return int(_Pairs.of(a, b, left, sizes, pruning).counts.sum())


def _left(a: Labels, b: Labels, without: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The variables that remain after a join, and their numbers of choices."""
    left = tuple(v for v in sorted({*a.variables, *b.variables}) if v != without)
    size_of = dict(zip((*a.variables, *b.variables), (*a.sizes, *b.sizes), strict=True))
    return left, tuple(size_of[variable] for variable in left)


def joined(
    a: Labels,
    b: Labels,
    *,
    without: int | None = None,
    pruning: LabelPruning | None = None,
    dominance: EpsilonDominance | None = None,
    terminal: TerminalJoin | None = None,
    by_numba: bool = False,
    allowance: Allowance | None = None,
) -> Labels:
    """The join of `a` and `b` on all of their variables but `without`: the non-dominated labels of each cell.

    Columns add, but of the last one the larger counts. Labels that `pruning` excludes are dropped before any
    comparison. With `dominance`, labels that others match within a step are dropped too. `terminal` is for a
    join that nothing follows. `by_numba` uses compiled loops for any size. Raises TooManyLabels above the
    limits, or above the `allowance`, with which no loop is compiled.
    """
    left, sizes = _left(a, b, without)
    has_tolerance = dominance is not None or (terminal is not None and terminal.slack is not None)
    most_pairs, most_labels = (
        (tuning.TUNING.most_pairs_with_tolerance, tuning.TUNING.most_labels_with_tolerance)
        if has_tolerance
        else (tuning.TUNING.most_pairs_if_exact, tuning.TUNING.most_labels_if_exact)
    )
    if has_tolerance and terminal is not None:
        most_pairs = max(most_pairs, terminal.pairs)
    most_labels = max(most_labels, tuning.TUNING.labels_per_cell * prod(sizes))
    if allowance is None and (by_numba or numba_dispatch.uses_numba(len(a) * len(b))):
        numba_join = numba_dispatch.NumbaJoin(a, b, left, sizes, without, pruning)
        found = (
            numba_join.terminal(terminal, most_pairs)
            if terminal
            else numba_join.labels(dominance, most_pairs, most_labels)
        )
        if found is None:
            raise TooManyLabels
        rows_a, rows_b, cells, points = found
        order = np.lexsort((*points.T[::-1], cells))
        origins = ((a, rows_a[order]), (b, rows_b[order]))
        return Labels(left, sizes, cells[order], points[order], origins)
    pairs = _Pairs.of(a, b, left, sizes, pruning)
    joint = _Joint.of(a, b, left, sizes, pruning, dominance, terminal)
    at_once = _PAIRS_AT_ONCE
    if allowance is not None:
        allowance.take(int(pairs.counts.sum()))
        at_once, most_labels = allowance.at_once, allowance.labels
    elif pairs.counts.sum() > most_pairs:
        raise TooManyLabels
    batches = []
    for start, stop in _chunks(pairs.counts, at_once):
        batches.append(joint.reduced(*pairs.rows(start, stop)))
        if allowance is not None and len(batches[-1][0]) > most_labels:
            raise TooManyLabels
    if len(batches) > 1:
        batches = [joint.reduced(*(np.concatenate(rows) for rows in zip(*batches, strict=True)))]
    rows_a, rows_b = batches[0] if batches else (np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp))
    if len(rows_a) > most_labels:
        raise TooManyLabels
    points = joint.points(rows_a, rows_b)
    return Labels(left, sizes, joint.cells(rows_a, rows_b), points, ((a, rows_a), (b, rows_b)))


@dataclass(slots=True, eq=False)
class _Joint:
    """The costs of pairs of labels, and which pairs stay."""

    a: Labels
    b: Labels
    pruning: LabelPruning | None
    dominance: EpsilonDominance | None
    at_a: Indices
    at_b: Indices
    terminal: TerminalJoin | None

    @staticmethod
    def of(
        a: Labels, b: Labels, left: tuple[int, ...], sizes: tuple[int, ...], pruning: LabelPruning | None,
        dominance: EpsilonDominance | None, terminal: TerminalJoin | None,
    ) -> _Joint:  # fmt: skip
        """For the pairs of two tables, on the remaining variables."""
        shared = tuple(variable for variable in a.variables if variable in b.variables)
        at_a, at_b = _strides(left, sizes, a), _strides(left, sizes, b, skip=shared)
        return _Joint(a, b, pruning, dominance, at_a, at_b, terminal)

    def cells(self, rows_a: Indices, rows_b: Indices) -> Indices:
        """The cell of each pair."""
        return np.asarray(self.at_a[rows_a] + self.at_b[rows_b])

    def points(self, rows_a: Indices, rows_b: Indices) -> Values:
        """The costs of each pair: columns add, but of the last one the larger counts."""
        points = _costs(self.a, self.b, rows_a, rows_b)
        if self.pruning is not None and self.pruning.peaks is not None:
            points[:, -1] = self._peaks(rows_a, rows_b)
        return points

    def _peaks(self, rows_a: Indices, rows_b: Indices) -> Values:
        peaks = np.asarray(np.maximum(self.a.points[rows_a, -1], self.b.points[rows_b, -1]))
        if self.pruning is not None and self.pruning.peaks is not None:
            peaks = np.maximum(peaks, self.pruning.peaks.reshape(-1)[self.cells(rows_a, rows_b)])
        return peaks

    def reduced(self, rows_a: Indices, rows_b: Indices) -> tuple[Indices, Indices]:
        """The pairs that stay, cell by cell."""
        if self.dominance is not None and self.terminal is None and (self.dominance.base > 0.0).all():
            retained = undominated_in_bins(
                self.cells(rows_a, rows_b), self._steps(rows_a, rows_b, self.dominance.base)
            )
            rows_a, rows_b = rows_a[retained], rows_b[retained]
        cells = self.cells(rows_a, rows_b)
        points = self.points(rows_a, rows_b)
        ranks = np.zeros(len(cells))
        if self.pruning is not None:
            retained, ranks = self.pruning.of(cells, points)
            rows_a, rows_b, cells, points = (
                rows_a[retained],
                rows_b[retained],
                cells[retained],
                points[retained],
            )
        if self.terminal is not None:
            best = non_dominated(measures(points), groups=cells)
        else:
            best = reduced(cells, points, ranks, self.dominance)
        return rows_a[best], rows_b[best]

    def _steps(self, rows_a: Indices, rows_b: Indices, steps: Values) -> list[Values]:
        """The columns in which pairs differ, in whole steps."""
        found = []
        last = len(steps) - 1
        for column, step in enumerate(steps):
            a, b = self.a.points[:, column], self.b.points[:, column]
            if (a != a[:1]).any() or (b != b[:1]).any():
                own = self._peaks(rows_a, rows_b) if column == last else a[rows_a] + b[rows_b]
                own /= step
                found.append(np.floor(own, out=own))
        return found


def _costs(a: Labels, b: Labels, rows_a: Indices, rows_b: Indices) -> Values:
    """The costs of pairs, without the peaks of the rest."""
    points = a.points[rows_a] + b.points[rows_b]
    points[:, -1] = np.maximum(a.points[rows_a, -1], b.points[rows_b, -1])
    return np.asarray(points)


@dataclass(slots=True, eq=False)
class _Pairs:
    """Which labels of `b` each label of `a` is joined with: `counts[i]` of them from `first[i]` of
    `by_key`."""

    by_key: Indices
    first: Indices
    counts: Indices

    @staticmethod
    def of(
        a: Labels, b: Labels, left: tuple[int, ...], sizes: tuple[int, ...], pruning: LabelPruning | None
    ) -> _Pairs:
        """All pairs that agree in their common variables and, by the first multipliers, are below the
        limit."""
        size_of = dict(zip((*a.variables, *b.variables), (*a.sizes, *b.sizes), strict=True))
        shared = tuple(variable for variable in a.variables if variable in b.variables)
        key_a, key_b = _keys(a, shared, size_of), _keys(b, shared, size_of)
        if pruning is None:
            by_key = np.argsort(key_b, kind="stable")
            first = np.searchsorted(key_b[by_key], key_a, side="left")
            return _Pairs(by_key, first, np.searchsorted(key_b[by_key], key_a, side="right") - first)
        sums_a = a.points @ pruning.weights_a[:, 0]
        away = tuple(place for place, variable in enumerate(left) if variable not in b.variables)
        outside = pruning.outside[..., 0].min(axis=away)
        at = b.coordinates()
        index = tuple(at[variable] for variable in left if variable in b.variables)
        sums_b = b.points @ pruning.weights_b[:, 0] + (outside[index] if index else outside)
        # Sorted by key, then by sum: keys are whole numbers, and scaled sums are less than one.
        remaining = pruning.padded_limit - sums_a
        retained_b = np.flatnonzero(np.isfinite(sums_b))
        sums_b, key_b = sums_b[retained_b], key_b[retained_b]
        low, high = sums_b.min(initial=0.0), sums_b.max(initial=0.0)
        span = 2.0 * (high - low) or 1.0
        place_b = key_b + (sums_b - low) / span
        by_key = np.argsort(place_b, kind="stable")
        first = np.searchsorted(place_b[by_key], key_a, side="left")
        end = np.searchsorted(
            place_b[by_key], key_a + np.clip((remaining - low) / span + 1e-9, -0.25, 0.75), side="right"
        )
        return _Pairs(retained_b[by_key], first, np.maximum(end - first, 0))

    def rows(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """The pairs of the labels of `a` from start to stop, as rows of both tables."""
        counts = self.counts[start:stop]
        rows_a = np.repeat(np.arange(start, stop), counts)
        offsets = np.arange(len(rows_a)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows_a, self.by_key[self.first[rows_a] + offsets]


def keys_on(table: Labels, shared: tuple[int, ...]) -> Indices:
    """The flat index of some variables of a table, for each label."""
    return _keys(table, shared, dict(zip(table.variables, table.sizes, strict=True)))


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
    """The part of the flat index of the cells `left` that the variables of `table` give, for each label."""
    at = table.coordinates()
    index = np.zeros(len(table), dtype=np.intp)
    for variable, size in zip(left, sizes, strict=True):
        index = index * size
        if variable in at and variable not in skip:
            index = index + at[variable]
    return index


def _chunks(counts: Indices, at_once: int) -> list[tuple[int, int]]:
    """Ranges of rows with about `at_once` pairs each."""
    if not len(counts):
        return []
    totals = np.cumsum(counts)
    cuts = np.searchsorted(totals, np.arange(at_once, int(totals[-1]), at_once)) + 1
    edges = [0, *sorted(set(cuts.tolist())), len(counts)]
    return [(start, stop) for start, stop in pairwise(edges) if stop > start]


def leaf_rows(table: Labels, rows: Indices) -> list[Indices]:
    """For each given table that a table was made of, in order, the rows that made its `rows`."""
    if not table.origins:
        return [rows]
    return [leaf for origin, own in table.origins for leaf in leaf_rows(origin, own[rows])]


def chosen(table: Labels, rows: Indices) -> dict[int, Indices]:
    """The choice of every variable that some labels were made of, one for each label."""
    if not table.origins:
        return table.coordinates(rows)
    found: dict[int, Indices] = {}
    for origin, own in table.origins:
        found |= chosen(origin, own[rows])
    if table.names is not None:
        return {table.names[variable]: choices for variable, choices in found.items()}
    return found
