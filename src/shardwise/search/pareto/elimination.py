"""Variable elimination of one factor graph: the labels of its separator (FT, frontier tracking).

`eliminated` runs the steps of an elimination order on tables of labels. `EqualTables` finds tables that
differ in their variables only, so that they are made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt

import numpy as np

from shardwise.pareto import COLUMNS, FactorGraph
from shardwise.search.pareto import tuning
from shardwise.search.pareto.dominance import EpsilonDominance
from shardwise.search.pareto.elimination_order import EliminationOrder, EliminationStep
from shardwise.search.pareto.labels import (
    Allowance,
    LabelPruning,
    Labels,
    Values,
    joined,
    labels_of,
    pairs_of,
)
from shardwise.search.pareto.weighted_sums import FactorSums, PeakShares, TableViews, equal_tables


@dataclass(frozen=True, slots=True, eq=False)
class EqualTables:
    """Which tables of a factor graph are equal but for their variables: the `first` of each, and `every`
    table that is equal to a first one."""

    order: EliminationOrder
    first: dict[int, int]
    every: dict[int, list[int]]
    _names: dict[int, dict[int, int]] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(order: EliminationOrder, peak_shares: PeakShares, first_equal: tuple[int, ...]) -> EqualTables:
        """Given where the peak is weighed, and which factors are equal."""
        first = equal_tables(order, peak_shares, first_equal)
        every: dict[int, list[int]] = {}
        for table, own in first.items():
            every.setdefault(own, []).append(table)
        return EqualTables(order, first, every)

    def least(self, sums: TableViews, table: int, onto: tuple[int, ...]) -> Values:
        """The least of the sums of all tables that are equal to a made one, for each choice of the variables
        `onto`; weights last."""
        rows = [sums[like] for like in self.every[self.first[table]]]
        least = np.minimum.reduce(rows) if len(rows) > 1 else rows[0]
        variables = self.order.variables_of(table)
        away = tuple(axis for axis, variable in enumerate(variables) if variable not in onto)
        return np.asarray(least.min(axis=away) if away else least)

    def renamed(self, labels: Labels, table: int) -> Labels:
        """The labels of the first table equal to `table`, renamed to the variables of `table`."""
        if table not in self._names:
            self._names[table] = self._names_of(self.first[table], table)
        return labels.renamed(self._names[table])

    def _names_of(self, first: int, table: int) -> dict[int, int]:
        """Maps the variables of a table and of its inputs to those of an equal table."""
        order = self.order
        names = dict(zip(order.variables_of(first), order.variables_of(table), strict=True))
        given = len(order.factors)
        if first >= given:
            ours, theirs = order.steps[first - given], order.steps[table - given]
            if ours.variable is not None and theirs.variable is not None:
                names[ours.variable] = theirs.variable
            for own, other in zip(ours.inputs, theirs.inputs, strict=True):
                names |= self._names_of(own, other)
        return names


def unfolded_tolerance(tolerance: Values) -> Values:
    """The tolerance of the columns before they are folded: half of the peak's for recomputed bytes, half for
    the temporary."""
    return np.asarray([*tolerance[:3], tolerance[3] / 2.0, tolerance[3] / 2.0])


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


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """The labels of a table, its number of factors, and the part of the peak's weight weighed there."""

    labels: Labels
    factors: int
    share: float

    @property
    def rank(self) -> tuple[int, tuple[int, ...]]:
        """Small tables come first."""
        return len(self.labels), self.labels.variables


_NOTHING = _Made(labels_of((), np.zeros((len(COLUMNS),))), 0, 0.0)
"""A single label without cost, on no variable."""


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
    own = None if limits is None else _LimitedSteps.of(part, order, limits)
    shares = dict(own.factor_sums.peak_shares) if own is not None else {}
    tables = {
        place: _Made(labels_of(factor.variables, factor.costs), 1, shares.get(place, 0.0))
        for place, factor in enumerate(part.factors)
    }
    for step in order.steps:
        first = step.output if own is None else own.equal.first[step.output]
        if own is not None and first != step.output:
            made = tables[first]
            tables[step.output] = _Made(own.equal.renamed(made.labels, step.output), made.factors, made.share)
            continue
        waiting = sorted((tables[table] for table in step.inputs), key=lambda made: made.rank)
        waiting += [_NOTHING] * (2 - len(waiting))
        while len(waiting) > 2:  # small tables are joined first
            a, b = waiting[:2]
            both = _Made(
                joined(a.labels, b.labels, allowance=allowance), a.factors + b.factors, a.share + b.share
            )
            waiting = sorted([both, *waiting[2:]], key=lambda made: made.rank)
        a, b = waiting
        if own is None:
            labels = joined(a.labels, b.labels, without=step.variable, allowance=allowance)
        else:
            labels = own.joined(step, a, b)
        tables[step.output] = _Made(labels, a.factors + b.factors, a.share + b.share)
    return _with_separator(part, tables[order.last].labels)


def _with_separator(part: FactorGraph, found: Labels) -> Labels:
    """The labels on all variables of the separator."""
    for end in part.separator:
        if end not in found.variables:  # no factor is on it
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _LimitedSteps:
    """Steps of an elimination within limits, and the tolerance that they spend.

    Only joins of many pairs spend tolerance. On each path from the factors to a table, `spent` is at most
    `spendable` by then. Tolerance that is not spent early, where labels are few, is left for the large tables
    at the end. A table's share grows with its number of factors and with the excess of its labels, so the
    shares of disjoint tables add up to at most the whole.
    """

    factor_sums: FactorSums
    limit: float
    equal: EqualTables
    dominance: EpsilonDominance | None
    potentials: TableViews | None
    spent: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(part: FactorGraph, order: EliminationOrder, limits: EliminationLimits) -> _LimitedSteps:
        """Of a factor graph, with the potentials under its weights."""
        factor_sums, dominance = limits.factor_sums, limits.dominance
        equal = EqualTables.of(order, factor_sums.peak_shares, part.first_equal)
        potentials = None
        if dominance is not None:
            sizes = (part.sizes[variable] for variable in part.separator)
            potentials = factor_sums.potentials(dominance.potential.reshape((*sizes, 1)))
        return _LimitedSteps(factor_sums, limits.limit, equal, dominance, potentials)

    def joined(self, step: EliminationStep, a: _Made, b: _Made) -> Labels:
        """The table of a step from two tables."""
        left = tuple(sorted({*a.labels.variables, *b.labels.variables} - {step.variable}))
        pruning = LabelPruning(
            self._weights(a.share), self._weights(b.share), self._weights(a.share + b.share),
            self.equal.least(self.factor_sums.outside, step.output, left), self.limit,
        )  # fmt: skip
        dominance = None
        if self.dominance is not None and self.potentials is not None:
            before = self._spent_before(step)
            self.spent[step.output] = before
            if _has_many_pairs(a.labels, b.labels, step.variable, pruning):
                share = (a.factors + b.factors) / len(self.factor_sums.part.factors)
                part = max(spendable(share) - before, 0.0)
                self.spent[step.output] = before + part
                potential = self.equal.least(self.potentials, step.output, left)[..., 0].reshape(-1)
                dominance = EpsilonDominance(
                    unfolded_tolerance(part * share * self.dominance.base),
                    unfolded_tolerance(part * self.dominance.rate), pruning.weights[:, 0],
                    np.where(np.isfinite(potential), potential, 0.0),  # no label is feasible there
                )  # fmt: skip
        return joined(a.labels, b.labels, without=step.variable, pruning=pruning, dominance=dominance)

    def _spent_before(self, step: EliminationStep) -> float:
        firsts = (self.equal.first[table] for table in step.inputs)
        return max((self.spent.get(table, 0.0) for table in firsts), default=0.0)

    def _weights(self, share: float) -> Values:
        """Weights of a table's columns under each multiplier: the peak has this part of its weight."""
        weights = self.factor_sums.weights.T.copy()
        weights[-1] *= share
        return weights


def spendable(share: float) -> float:
    """Share of a factor graph's tolerance that may be spent once this share of its factors is joined; at most
    1."""
    return sqrt(share)


def _has_many_pairs(a: Labels, b: Labels, without: int | None, pruning: LabelPruning) -> bool:
    return (
        len(a) * len(b) >= tuning.TUNING.tolerance_from_pairs
        and pairs_of(a, b, without=without, pruning=pruning) >= tuning.TUNING.tolerance_from_pairs
    )
