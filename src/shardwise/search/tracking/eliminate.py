"""Tracking frontiers through one part: elimination of its variables, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from shardwise.frontier import COLUMNS, FactorGraph
from shardwise.search.tracking.flat import TableViews
from shardwise.search.tracking.flat_labels import eliminated_by_numba, is_plain, unfolded_tolerance
from shardwise.search.tracking.grid import EpsilonDominance
from shardwise.search.tracking.labels import (
    Allowance,
    LabelPruning,
    Labels,
    Values,
    joined,
    labels_of,
    pairs_of,
)
from shardwise.search.tracking.likes import EqualTables
from shardwise.search.tracking.scalars import FactorSums, Sums
from shardwise.search.tracking.steps import EliminationOrder, EliminationStep

TOLERANCE_FROM_PAIRS = 8192
"""From how many pairs of labels on a step loses what may be lost by then."""


@dataclass(frozen=True, slots=True, eq=False)
class EliminationLimits:
    """How far the labels of a part reach: `factor_sums` under the forms of one line, after `spread`, and the
    weighted sum of the whole that is still wanted in each. `dominance` is what they may lose in all, in
    folded columns, its potential that of the last table, variables by their numbers; None where nothing."""

    factor_sums: FactorSums
    limit: float
    dominance: EpsilonDominance | None = None


def eliminated(
    part: FactorGraph,
    order: EliminationOrder,
    limits: EliminationLimits | None = None,
    allowance: Allowance | None = None,
) -> Labels:
    """The frontiers of a part for each choice of what others see of it; labels beyond the limits are dropped
    as soon as they arise. Without limits an `allowance` may say where to give up. Tables that are alike, such
    as those of layers that all read one tensor, are made once, of the labels that matter in any of them."""
    if limits is not None and limits.factor_sums.flat is not None and is_plain(order):
        factor_sums, flat = limits.factor_sums, limits.factor_sums.flat
        return _with_separator(
            part, eliminated_by_numba(factor_sums, flat, limits.limit, limits.dominance, TOLERANCE_FROM_PAIRS)
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
    """Labels on all that others see."""
    for end in part.separator:
        if end not in found.variables:  # nothing there costs anything
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


@dataclass(slots=True, eq=False)
class _ToleranceSpending:
    """What the steps of a part may lose that come to many pairs: along any way from the factors to a table
    (`spent`) no more than what `spendable` by then. What is not lost early, where labels are few, is left
    for the large tables at the end.

    Each table bears it for the factors in it, of all that there are, and in proportion to the excesses of its
    labels: of tables side by side both add up to no more than the whole.
    """

    factor_sums: FactorSums
    dominance: EpsilonDominance
    potentials: dict[int, Sums] | TableViews
    spent: dict[int, float]

    @staticmethod
    def of(part: FactorGraph, factor_sums: FactorSums, dominance: EpsilonDominance) -> _ToleranceSpending:
        """Of a part, under the weights of its scalars."""
        outside = dominance.potential.reshape((*(part.sizes[variable] for variable in part.separator), 1))
        potentials = factor_sums.potentials(outside)
        return _ToleranceSpending(factor_sums, dominance, potentials, {})

    def pass_by(self, step: EliminationStep) -> None:
        """A step that loses nothing itself."""
        self.spent[step.output] = self._spent_before(step)

    def dominance_of(
        self, step: EliminationStep, equal_tables: EqualTables, factors: int, weights: Values
    ) -> EpsilonDominance:
        """Of the labels of a step's table, made of so many factors, whose columns weigh this much."""
        before = self._spent_before(step)
        share = factors / len(self.factor_sums.part.factors)
        part = max(spendable(share) - before, 0.0)
        self.spent[step.output] = before + part
        potential = equal_tables.least(self.potentials, step.output)[..., 0].reshape(-1)
        potential[~np.isfinite(potential)] = 0.0  # no label matters there
        base = part * share * self.dominance.base
        return EpsilonDominance(
            unfolded_tolerance(base), unfolded_tolerance(part * self.dominance.rate), weights[:, 0], potential
        )

    def _spent_before(self, step: EliminationStep) -> float:
        firsts = (self.factor_sums.made[table] for table in step.inputs)
        return max((self.spent.get(table, 0.0) for table in firsts), default=0.0)


def spendable(share: float) -> float:
    """Of all that a part may lose, what it may have lost where this share of its factors is joined; all at
    most."""
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
    """The table that a step makes, of tables and the factors in each; small tables are joined first."""
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
        len(a) * len(b) >= TOLERANCE_FROM_PAIRS
        and pairs_of(a, b, without=without, pruning=pruning) >= TOLERANCE_FROM_PAIRS
    )


def _weights(limits: EliminationLimits, factors: frozenset[int]) -> Values:
    """What the columns of a table weigh in each form: a peak as far as it is weighed at factors inside."""
    weights = limits.factor_sums.weights.T.copy()
    weights[-1] *= sum(share for factor, share in limits.factor_sums.peak_shares if factor in factors)
    return np.asarray(weights)
