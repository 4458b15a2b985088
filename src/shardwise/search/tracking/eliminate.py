"""Tracking frontiers through one part: elimination of its variables, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from shardwise.frontier import COLUMNS, Part
from shardwise.search.tracking.flat import Views
from shardwise.search.tracking.flat_labels import eliminated_at_once, is_plain, unfolded
from shardwise.search.tracking.grid import Grid
from shardwise.search.tracking.labels import (
    Allowance,
    Labels,
    Values,
    Within,
    joined,
    labels_of,
    pairs_of,
)
from shardwise.search.tracking.likes import Likes
from shardwise.search.tracking.scalars import Scalars, Sums
from shardwise.search.tracking.steps import Order, Step

MANY = 8192
"""From how many pairs of labels on a step loses what may be lost by then."""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """How far the labels of a part reach: `scalars` under the forms of one line, after `spread`, and the
    weighted sum of the whole that is still wanted in each. `grid` is what they may lose in all, in folded
    columns, its potential that of the last table, variables by their numbers; None where nothing."""

    scalars: Scalars
    limit: float
    grid: Grid | None = None


def eliminated(
    part: Part, order: Order, limits: Limits | None = None, allowance: Allowance | None = None
) -> Labels:
    """The frontiers of a part for each choice of what others see of it; labels beyond the limits are dropped
    as soon as they arise. Without limits an `allowance` may say where to give up. Tables that are alike, such
    as those of layers that all read one tensor, are made once, of the labels that matter in any of them."""
    if limits is not None and limits.scalars.flat is not None and is_plain(order):
        scalars, flat = limits.scalars, limits.scalars.flat
        return _with_ends(part, eliminated_at_once(scalars, flat, limits.limit, limits.grid, MANY))
    factors_in = {place: frozenset([place]) for place in range(len(part.factors))}
    tables = {place: labels_of(factor.variables, factor.costs) for place, factor in enumerate(part.factors)}
    likes = None if limits is None else Likes.of(limits.scalars)
    losing = None
    if limits is not None and limits.grid is not None:
        losing = _Losing.of(part, limits.scalars, limits.grid)
    for step in order.steps:
        factors_in[step.output] = frozenset().union(*(factors_in[table] for table in step.inputs))
        first = step.output if likes is None else likes.first(step.output)
        if likes is not None and first != step.output:
            tables[step.output] = likes.renamed(tables[first], step.output)
            continue
        inputs = [(tables[table], factors_in[table]) for table in step.inputs]
        tables[step.output] = _done(step, inputs, limits, likes, losing, order.is_flat, allowance)
    return _with_ends(part, tables[order.last])


def _with_ends(part: Part, found: Labels) -> Labels:
    """Labels on all that others see."""
    for end in part.kept:
        if end not in found.variables:  # nothing there costs anything
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


@dataclass(slots=True, eq=False)
class _Losing:
    """What the steps of a part may lose that come to many pairs: along any way from the factors to a table
    (`lost`) no more than what `may_be_lost` by then. What is not lost early, where labels are few, is left
    for the large tables at the end.

    Each table bears it for the factors in it, of all that there are, and in proportion to the excesses of its
    labels: of tables side by side both add up to no more than the whole.
    """

    scalars: Scalars
    grid: Grid
    potentials: dict[int, Sums] | Views
    lost: dict[int, float]

    @staticmethod
    def of(part: Part, scalars: Scalars, grid: Grid) -> _Losing:
        """Of a part, under the weights of its scalars."""
        outside = grid.potential.reshape((*(part.sizes[variable] for variable in part.kept), 1))
        potentials = scalars.potentials(outside)
        return _Losing(scalars, grid, potentials, {})

    def pass_by(self, step: Step) -> None:
        """A step that loses nothing itself."""
        self.lost[step.output] = self._lost_before(step)

    def grid_of(self, step: Step, likes: Likes, factors: int, weights: Values) -> Grid:
        """Of the labels of a step's table, made of so many factors, whose columns weigh this much."""
        before = self._lost_before(step)
        share = factors / len(self.scalars.part.factors)
        part = max(may_be_lost(share) - before, 0.0)
        self.lost[step.output] = before + part
        potential = likes.least(self.potentials, step.output)[..., 0].reshape(-1)
        potential[~np.isfinite(potential)] = 0.0  # no label matters there
        base = part * share * self.grid.base
        return Grid(unfolded(base), unfolded(part * self.grid.rate), weights[:, 0], potential)

    def _lost_before(self, step: Step) -> float:
        firsts = (self.scalars.made[table] for table in step.inputs)
        return max((self.lost.get(table, 0.0) for table in firsts), default=0.0)


def may_be_lost(share: float) -> float:
    """Of all that a part may lose, what it may have lost where this share of its factors is joined; all at
    most."""
    return sqrt(share)


def _done(
    step: Step,
    inputs: list[tuple[Labels, frozenset[int]]],
    limits: Limits | None,
    likes: Likes | None,
    losing: _Losing | None,
    by_machine: bool,
    allowance: Allowance | None,
) -> Labels:
    """The table that a step makes, of tables and the factors in each; small tables are joined first."""
    waiting = sorted(inputs, key=lambda each: (len(each[0]), each[0].variables))
    nothing = (labels_of((), np.zeros((len(COLUMNS),))), frozenset[int]())
    waiting += [nothing] * (2 - len(waiting))
    while len(waiting) > 2:
        a, b = waiting[:2]
        both = (joined(a[0], b[0], by_machine=by_machine, allowance=allowance), a[1] | b[1])
        waiting = sorted([both, *waiting[2:]], key=lambda each: (len(each[0]), each[0].variables))
    a, b = waiting
    if limits is None or likes is None:
        return joined(a[0], b[0], without=step.variable, by_machine=by_machine, allowance=allowance)
    factors = a[1] | b[1]
    within = Within(
        _weights(limits, a[1]), _weights(limits, b[1]), _weights(limits, factors),
        likes.least(limits.scalars.outside, step.output), limits.limit,
    )  # fmt: skip
    grid = None
    if losing is not None:
        if _are_many(a[0], b[0], step.variable, within):
            grid = losing.grid_of(step, likes, len(factors), within.weights)
        else:
            losing.pass_by(step)
    return joined(a[0], b[0], without=step.variable, within=within, grid=grid, by_machine=by_machine)


def _are_many(a: Labels, b: Labels, without: int | None, within: Within) -> bool:
    return len(a) * len(b) >= MANY and pairs_of(a, b, without=without, within=within) >= MANY


def _weights(limits: Limits, factors: frozenset[int]) -> Values:
    """What the columns of a table weigh in each form: a peak as far as it is weighed at factors inside."""
    weights = limits.scalars.weights.T.copy()
    weights[-1] *= sum(share for factor, share in limits.scalars.peaked if factor in factors)
    return np.asarray(weights)
