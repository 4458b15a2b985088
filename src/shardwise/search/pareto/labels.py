"""Tables of labels and their joins: for each choice of a table's variables, the non-dominated costs of what
it covers.

`joined` is the join of two tables, with pruning, epsilon-dominance and limits. `chosen` goes back from labels
to the choices they were made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Costs
from shardwise.search.pareto import tuning
from shardwise.search.pareto.dominance import EpsilonDominance, dominance_arrays
from shardwise.ties import ROUNDING

if TYPE_CHECKING:
    from shardwise.search.pareto.joins_numba import PreparedSide, PruningArrays

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class TooManyLabels(Exception):
    """A join would exceed its limits of pairs or labels."""


@dataclass(slots=True)
class Allowance:
    """Limits for joins without bounds: `pairs` of labels in all joins, and `labels` in a table."""

    pairs: int
    labels: int


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
        return self.limit * (1.0 + ROUNDING)


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
    from shardwise.search.pareto.joins_numba import number_of_pairs

    own = _Join.of(a, b, without, pruning)
    return number_of_pairs(own.one[0], own.other[0], own.choices, own.pruning, len(a) * len(b))


def joined(
    a: Labels,
    b: Labels,
    *,
    without: int | None = None,
    pruning: LabelPruning | None = None,
    dominance: EpsilonDominance | None = None,
    terminal: TerminalJoin | None = None,
    allowance: Allowance | None = None,
) -> Labels:
    """The join of `a` and `b` on all of their variables but `without`: the non-dominated labels of each cell.

    Columns add, but of the last one the larger counts. Labels that `pruning` excludes are dropped before any
    comparison. With `dominance`, labels that others match within a step are dropped too. `terminal` is for a
    join that nothing follows. Raises TooManyLabels above the limits, or above the `allowance`.
    """
    own = _Join.of(a, b, without, pruning)
    has_tolerance = dominance is not None or (terminal is not None and terminal.slack is not None)
    most_pairs, most_labels = (
        (tuning.TUNING.most_pairs_with_tolerance, tuning.TUNING.most_labels_with_tolerance)
        if has_tolerance
        else (tuning.TUNING.most_pairs_if_exact, tuning.TUNING.most_labels_if_exact)
    )
    if has_tolerance and terminal is not None:
        most_pairs = max(most_pairs, terminal.pairs)
    most_labels = max(most_labels, tuning.TUNING.labels_per_cell * prod(own.sizes))
    if allowance is not None:
        most_pairs, most_labels = allowance.pairs, allowance.labels
    if terminal is None:
        pairs, rows, points = own.labels(dominance, most_pairs, most_labels)
    else:
        pairs, rows, points = own.terminal(terminal, most_pairs)
    if allowance is not None:
        allowance.pairs -= pairs
    rows_a, rows_b, cells = rows
    return Labels(own.left, own.sizes, cells, points, ((a, rows_a), (b, rows_b)))


@dataclass(frozen=True, slots=True, eq=False)
class _Join:
    """A join of two tables on the cells of `left` (variables, of `sizes`), prepared for compiled loops.
    `choices` are those of the eliminated variable."""

    left: tuple[int, ...]
    sizes: tuple[int, ...]
    one: PreparedSide
    other: PreparedSide
    choices: int
    pruning: PruningArrays

    @staticmethod
    def of(a: Labels, b: Labels, without: int | None, pruning: LabelPruning | None) -> _Join:
        """Of two tables, with the variable `without` eliminated."""
        size_of = dict(zip((*a.variables, *b.variables), (*a.sizes, *b.sizes), strict=True))
        choices = 1 if without is None else size_of.pop(without, 1)
        left = tuple(sorted(size_of))
        sizes = tuple(size_of[variable] for variable in left)
        axes = {variable: axis for axis, variable in enumerate(left)}
        width = a.points.shape[1]
        shape = np.array(sizes, dtype=np.intp)
        if pruning is None:
            nothing = np.zeros(width)
            one, other = _prepared(a, nothing, axes, shape), _prepared(b, nothing, axes, shape)
        else:
            one = _prepared(a, pruning.weights_a[:, 0], axes, shape)
            other = _prepared(b, pruning.weights_b[:, 0], axes, shape)
        return _Join(left, sizes, one, other, choices, _pruning_arrays(pruning, prod(sizes), width))

    def labels(
        self, dominance: EpsilonDominance | None, most_pairs: int, most_labels: int
    ) -> tuple[int, Indices, Values]:
        """Pairs compared, rows (in both tables, and cells) of the labels that stay, by ascending cell, and
        their costs. TooManyLabels above a limit."""
        from shardwise.search.pareto.labels_numba import joined_sides

        cells, width = len(self.pruning.peaks), self.one[0].points.shape[1]
        arrays = dominance_arrays(dominance, cells, width)
        count, pairs, rows, points = joined_sides(
            self.one, self.other, self.choices, self.pruning, arrays, most_pairs, most_labels
        )
        if count < 0:
            raise TooManyLabels
        return pairs, rows, points

    def terminal(self, terminal: TerminalJoin, most_pairs: int) -> tuple[int, Indices, Values]:
        """The terminal join: labels compared by seconds and bytes, in any cell. Returns as `labels`."""
        from shardwise.search.pareto.joins_numba import terminal_pairs

        slack = np.zeros(2) if terminal.slack is None else terminal.slack
        (a, _, order_a), (b, _, order_b) = self.one, self.other
        count, pairs, rows = terminal_pairs(a, b, self.choices, self.pruning, slack, most_pairs)
        if count < 0:
            raise TooManyLabels
        rows = rows[:, :count]
        rows = rows[:, np.argsort(rows[2], kind="stable")]
        points_a, points_b = a.points[rows[0]], b.points[rows[1]]
        points = points_a + points_b
        peaks = np.maximum(points_a[:, -1], points_b[:, -1])
        points[:, -1] = np.maximum(peaks, self.pruning.peaks[rows[2]])
        return pairs, np.stack([order_a[rows[0]], order_b[rows[1]], rows[2]]), points


def _prepared(table: Labels, weights: Values, axes: Mapping[int, int], left: Indices) -> PreparedSide:
    """A table prepared for the loops, with the columns in which its labels differ."""
    from shardwise.search.pareto.joins_numba import side_of

    return side_of(
        np.ascontiguousarray(table.points), table.cells, np.ascontiguousarray(weights),
        np.array(table.sizes, dtype=np.intp),
        np.array([axes.get(variable, -1) for variable in table.variables], dtype=np.intp), left,
    )  # fmt: skip


def _pruning_arrays(pruning: LabelPruning | None, cells: int, width: int) -> PruningArrays:
    from shardwise.search.pareto.joins_numba import PruningArrays

    if pruning is None:
        return PruningArrays(np.zeros((0, width)), np.zeros((cells, 0)), np.inf, np.full(cells, -np.inf))
    multipliers = pruning.weights.shape[1]
    peaks = np.full(cells, -np.inf) if pruning.peaks is None else np.array(pruning.peaks).reshape(-1)
    return PruningArrays(
        np.array(pruning.weights.T, order="C"),
        np.array(pruning.outside, order="C").reshape((-1, multipliers)),
        float(pruning.padded_limit), peaks,
    )  # fmt: skip


def keys_on(table: Labels, shared: tuple[int, ...]) -> Indices:
    """The flat index of some variables of a table, for each label."""
    at, size_of = table.coordinates(), dict(zip(table.variables, table.sizes, strict=True))
    key = np.zeros(len(table), dtype=np.intp)
    for variable in shared:
        key = key * size_of[variable] + at[variable]
    return key


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
