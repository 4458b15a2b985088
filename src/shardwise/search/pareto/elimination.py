"""Variable elimination of one factor graph: the labels of its separator (FT, frontier tracking).

`eliminated` runs the steps of an elimination order on tables of labels. `EqualTables` finds tables that
differ in their variables only, so that they are made once. `eliminated_by_numba` runs all steps in one
compiled pass (`elimination_numba`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.pareto import COLUMNS, FactorGraph
from shardwise.search.pareto import tuning
from shardwise.search.pareto.bound_sets import SLACK
from shardwise.search.pareto.dominance import EpsilonDominance
from shardwise.search.pareto.elimination_order import EliminationOrder, EliminationStep
from shardwise.search.pareto.labels import (
    Allowance,
    LabelPruning,
    Labels,
    TooManyLabels,
    Values,
    joined,
    labels_of,
    pairs_of,
)
from shardwise.search.pareto.weighted_sums import (
    FactorSums,
    FlatSums,
    PeakShares,
    Sums,
    TableViews,
    costs_of,
    program_of,
)

if TYPE_CHECKING:
    from shardwise.search.pareto.elimination_numba import EliminatedTables, ToleranceArrays


@dataclass(frozen=True, slots=True, eq=False)
class EqualTables:
    """Which tables of a factor graph are equal but for their variables, by the first of each, and the steps
    that make them."""

    factor_sums: FactorSums
    steps: dict[int, EliminationStep]
    equal_tables_of: dict[int, list[int]]

    @staticmethod
    def of(factor_sums: FactorSums) -> EqualTables:
        """From the tables of a factor graph as weighted sums."""
        equal_tables_of: dict[int, list[int]] = {}
        for table, first in factor_sums.made.items():
            equal_tables_of.setdefault(first, []).append(table)
        return EqualTables(
            factor_sums, {step.output: step for step in factor_sums.order.steps}, equal_tables_of
        )

    def first(self, table: int) -> int:
        """The first table that is equal to this one."""
        return self.factor_sums.made[table]

    def least(self, sums: dict[int, Sums] | TableViews, table: int) -> Values:
        """The least of the sums of all tables that are equal to a table, its variables in ascending order."""
        order = np.argsort(self.factor_sums.axes[table])
        rows = [sums[like] for like in self.equal_tables_of[self.first(table)]]
        return np.asarray(np.minimum.reduce(rows).transpose((*order, len(order))))

    def renamed(self, labels: Labels, table: int) -> Labels:
        """The labels of the first table equal to `table`, renamed to the variables of `table`."""
        return labels.renamed(self.names(self.first(table), table))

    def names(self, first: int, table: int) -> dict[int, int]:
        """Maps the variables of a table and of its inputs to those of an equal table."""
        axes = self.factor_sums.axes
        names = dict(zip(axes[first], axes[table], strict=True))
        if first in self.steps:
            ours, theirs = self.steps[first], self.steps[table]
            if ours.variable is not None and theirs.variable is not None:
                names[ours.variable] = theirs.variable
            for own, other in zip(ours.inputs, theirs.inputs, strict=True):
                names |= self.names(own, other)
        return names


Indices = npt.NDArray[np.intp]


_NEVER = int(np.iinfo(np.intp).max)
"""A number of pairs that no join reaches."""


@lru_cache(maxsize=256)
def is_plain(order: EliminationOrder) -> bool:
    """Whether each step makes a table on exactly the variables of its inputs, less the eliminated one."""
    for step in order.steps:
        met = {variable for table in step.inputs for variable in order.variables_of(table)}
        if met - {step.variable} != set(step.variables):
            return False
    return True


@lru_cache(maxsize=256)
def _factors_in(order: EliminationOrder) -> list[frozenset[int]]:
    """The factors in each table."""
    found = [frozenset([place]) for place in range(len(order.factors))]
    for step in order.steps:
        found.append(frozenset().union(*(found[table] for table in step.inputs)))
    return found


@lru_cache(maxsize=1024)
def _counts_and_shares(order: EliminationOrder, peak_shares: PeakShares) -> tuple[Indices, Values]:
    """Number of factors in each table, and the part of the peak's weight weighed there."""
    every = _factors_in(order)
    shares = [sum(share for factor, share in peak_shares if factor in own) for own in every]
    return np.array([len(own) for own in every], dtype=np.intp), np.array(shares, dtype=np.float64)


def eliminated_by_numba(
    factor_sums: FactorSums,
    flat: FlatSums,
    limit: float,
    dominance: EpsilonDominance | None,
    tolerance_from_pairs: int,
) -> Labels:
    """The labels of the last table of a factor graph, in one compiled pass, from sums in flat arrays after
    `distribute`.

    Only labels whose weighted sums, with the least outside, are below the limit stay. Steps with
    `tolerance_from_pairs` pairs of labels or more spend the tolerance of `dominance`, whose potential is that
    of the last table. Raises TooManyLabels if limits are exceeded.
    """
    from shardwise.search.pareto.elimination_numba import (
        FactorGraphArrays,
        JoinLimits,
        OutsideSums,
        eliminated_labels,
    )

    order = flat.order
    counts, shares = _counts_and_shares(order, factor_sums.peak_shares)
    made = eliminated_labels(
        FactorGraphArrays(program_of(order), flat.sizes, costs_of(flat.part), flat.first, counts, shares),
        OutsideSums(
            np.ascontiguousarray(factor_sums.weights), limit * (1.0 + SLACK), flat.places, flat.outside
        ),
        _tolerance_arrays(flat, dominance, tolerance_from_pairs),
        JoinLimits(
            tuning.TUNING.most_pairs_if_exact,
            tuning.TUNING.most_labels_if_exact,
            tuning.TUNING.labels_per_cell,
        ),
    )
    if not made.is_done:
        raise TooManyLabels
    return _Tables(flat, EqualTables.of(factor_sums), made).labels(order.last)


def _tolerance_arrays(
    flat: FlatSums, dominance: EpsilonDominance | None, tolerance_from_pairs: int
) -> ToleranceArrays:
    """The tolerance as arrays for compiled loops."""
    from shardwise.search.pareto.elimination_numba import ToleranceArrays

    if dominance is None:
        none = np.zeros(5)
        return ToleranceArrays(
            none,
            none,
            np.zeros((1, 0)),
            _NEVER,
            tuning.TUNING.most_pairs_with_tolerance,
            tuning.TUNING.most_labels_with_tolerance,
        )
    outside = dominance.potential.reshape(
        (*(flat.part.sizes[variable] for variable in flat.part.separator), 1)
    )
    return ToleranceArrays(
        unfolded_tolerance(dominance.base), unfolded_tolerance(dominance.rate),
        flat.potentials(outside).columns, tolerance_from_pairs, tuning.TUNING.most_pairs_with_tolerance,
        tuning.TUNING.most_labels_with_tolerance,
    )  # fmt: skip


def unfolded_tolerance(tolerance: Values) -> Values:
    """The tolerance of the columns before they are folded: half of the peak's for recomputed bytes, half for
    the temporary."""
    return np.asarray([*tolerance[:3], tolerance[3] / 2.0, tolerance[3] / 2.0])


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """The tables that the compiled pass made."""

    flat: FlatSums
    equal_tables: EqualTables
    made: EliminatedTables
    known: dict[int, Labels] = field(default_factory=dict)

    def labels(self, table: int) -> Labels:
        """The labels of a table, with the tables it was made of."""
        if table not in self.known:
            self.known[table] = self._labels(table)
        return self.known[table]

    def _labels(self, table: int) -> Labels:
        order, made = self.flat.order, self.made
        given = len(order.factors)
        if given <= table < given + len(order.steps) and self.equal_tables.first(table) != table:
            return self.equal_tables.renamed(self.labels(self.equal_tables.first(table)), table)
        rows = slice(int(made.start[table]), int(made.stop[table]))
        origins = tuple(
            (self.labels(origin) if origin >= 0 else _NOTHING, made.rows[side, rows])
            for side, origin in enumerate(made.tables[:, table].tolist() if table >= given else ())
        )
        if table < given + len(order.steps):
            variables = order.variables_of(table)
        else:
            variables = tuple(sorted({each for origin, _ in origins for each in origin.variables}))
        sizes = tuple(self.flat.part.sizes[variable] for variable in variables)
        return Labels(variables, sizes, made.cells[rows], made.points[rows], origins)


_NOTHING = labels_of((), np.zeros((5,)))
"""A single label without cost, on no variable."""


@dataclass(frozen=True, slots=True, eq=False)
class EliminationLimits:
    """Limits of the labels of a factor graph during elimination.

    `factor_sums` are its weighted sums under the multipliers of one bound, after `distribute`; `limit` is the
    limit of the whole sum under each. `dominance` is the tolerance of all steps together, in folded columns,
    with the potential of the last table, variables by their numbers; None if there is none.
    """

    factor_sums: FactorSums
    limit: float
    dominance: EpsilonDominance | None = None


def eliminated(
    part: FactorGraph,
    order: EliminationOrder,
    limits: EliminationLimits | None = None,
    allowance: Allowance | None = None,
) -> Labels:
    """The labels of a factor graph for each choice of its separator.

    Labels above the limits are dropped wherever they arise. Equal tables, such as those of layers that all
    read one tensor, are made once, with the labels needed in any of them. Without limits an `allowance` may
    limit the joins. Raises TooManyLabels.
    """
    if limits is not None and limits.factor_sums.flat is not None and is_plain(order):
        factor_sums, flat = limits.factor_sums, limits.factor_sums.flat
        return _with_separator(
            part,
            eliminated_by_numba(
                factor_sums, flat, limits.limit, limits.dominance, tuning.TUNING.tolerance_from_pairs
            ),
        )
    factors_in = {place: frozenset([place]) for place in range(len(part.factors))}
    tables = {place: labels_of(factor.variables, factor.costs) for place, factor in enumerate(part.factors)}
    equal_tables = None if limits is None else EqualTables.of(limits.factor_sums)
    spending = None
    if limits is not None and limits.dominance is not None:
        spending = _ToleranceSpending.of(part, limits.factor_sums, limits.dominance)
    for step in order.steps:
        factors_in[step.output] = frozenset().union(*(factors_in[table] for table in step.inputs))
        first = step.output if equal_tables is None else equal_tables.first(step.output)
        if equal_tables is not None and first != step.output:
            tables[step.output] = equal_tables.renamed(tables[first], step.output)
            continue
        inputs = [(tables[table], factors_in[table]) for table in step.inputs]
        tables[step.output] = _done(step, inputs, limits, equal_tables, spending, order.uses_numba, allowance)
    return _with_separator(part, tables[order.last])


def _with_separator(part: FactorGraph, found: Labels) -> Labels:
    """The labels on all variables of the separator."""
    for end in part.separator:
        if end not in found.variables:  # no factor is on it
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


@dataclass(slots=True, eq=False)
class _ToleranceSpending:
    """Tolerance that the joins of a factor graph spend.

    Only joins of many pairs spend it. On each path from the factors to a table, `spent` is at most
    `spendable` by then. Tolerance that is not spent early, where labels are few, is left for the large tables
    at the end. A table's share grows with its number of factors and with the excess of its labels, so the
    shares of disjoint tables add up to at most the whole.
    """

    factor_sums: FactorSums
    dominance: EpsilonDominance
    potentials: dict[int, Sums] | TableViews
    spent: dict[int, float]

    @staticmethod
    def of(part: FactorGraph, factor_sums: FactorSums, dominance: EpsilonDominance) -> _ToleranceSpending:
        """Of a factor graph, with the potentials under its weights."""
        outside = dominance.potential.reshape((*(part.sizes[variable] for variable in part.separator), 1))
        potentials = factor_sums.potentials(outside)
        return _ToleranceSpending(factor_sums, dominance, potentials, {})

    def pass_by(self, step: EliminationStep) -> None:
        """Record a step that spends nothing itself."""
        self.spent[step.output] = self._spent_before(step)

    def dominance_of(
        self, step: EliminationStep, equal_tables: EqualTables, factors: int, weights: Values
    ) -> EpsilonDominance:
        """Epsilon-dominance of a step's table of so many factors, under these weights of its columns."""
        before = self._spent_before(step)
        share = factors / len(self.factor_sums.part.factors)
        part = max(spendable(share) - before, 0.0)
        self.spent[step.output] = before + part
        potential = equal_tables.least(self.potentials, step.output)[..., 0].reshape(-1)
        potential[~np.isfinite(potential)] = 0.0  # no label is feasible there
        base = part * share * self.dominance.base
        return EpsilonDominance(
            unfolded_tolerance(base), unfolded_tolerance(part * self.dominance.rate), weights[:, 0], potential
        )

    def _spent_before(self, step: EliminationStep) -> float:
        firsts = (self.factor_sums.made[table] for table in step.inputs)
        return max((self.spent.get(table, 0.0) for table in firsts), default=0.0)


def spendable(share: float) -> float:
    """Share of a factor graph's tolerance that may be spent once this share of its factors is joined; at most
    1."""
    return sqrt(share)


def _done(
    step: EliminationStep,
    inputs: list[tuple[Labels, frozenset[int]]],
    limits: EliminationLimits | None,
    equal_tables: EqualTables | None,
    spending: _ToleranceSpending | None,
    by_numba: bool,
    allowance: Allowance | None,
) -> Labels:
    """The table of one step, from its input tables with the factors in each. Small tables are joined
    first."""
    waiting = sorted(inputs, key=lambda each: (len(each[0]), each[0].variables))
    nothing = (labels_of((), np.zeros((len(COLUMNS),))), frozenset[int]())
    waiting += [nothing] * (2 - len(waiting))
    while len(waiting) > 2:
        a, b = waiting[:2]
        both = (joined(a[0], b[0], by_numba=by_numba, allowance=allowance), a[1] | b[1])
        waiting = sorted([both, *waiting[2:]], key=lambda each: (len(each[0]), each[0].variables))
    a, b = waiting
    if limits is None or equal_tables is None:
        return joined(a[0], b[0], without=step.variable, by_numba=by_numba, allowance=allowance)
    factors = a[1] | b[1]
    pruning = LabelPruning(
        _weights(limits, a[1]), _weights(limits, b[1]), _weights(limits, factors),
        equal_tables.least(limits.factor_sums.outside, step.output), limits.limit,
    )  # fmt: skip
    dominance = None
    if spending is not None:
        if _has_many_pairs(a[0], b[0], step.variable, pruning):
            dominance = spending.dominance_of(step, equal_tables, len(factors), pruning.weights)
        else:
            spending.pass_by(step)
    return joined(a[0], b[0], without=step.variable, pruning=pruning, dominance=dominance, by_numba=by_numba)


def _has_many_pairs(a: Labels, b: Labels, without: int | None, pruning: LabelPruning) -> bool:
    return (
        len(a) * len(b) >= tuning.TUNING.tolerance_from_pairs
        and pairs_of(a, b, without=without, pruning=pruning) >= tuning.TUNING.tolerance_from_pairs
    )


def _weights(limits: EliminationLimits, factors: frozenset[int]) -> Values:
    """Weights of a table's columns under each multiplier: the peak has the weight of the factors inside."""
    weights = limits.factor_sums.weights.T.copy()
    weights[-1] *= sum(share for factor, share in limits.factor_sums.peak_shares if factor in factors)
    return np.asarray(weights)
