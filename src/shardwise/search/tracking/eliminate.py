"""Tracking frontiers through one part: elimination of its variables, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.frontier import COLUMNS, Part
from shardwise.search.tracking.chained import unbordered
from shardwise.search.tracking.grid import Grid
from shardwise.search.tracking.labels import Labels, Values, Within, joined, labels_of, pairs_of
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.steps import Order, Step

LOSSY_STEPS, MANY = 4, 32768
"""How many steps of a part may lose, and from how many pairs of labels on they do."""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """How far the labels of a part reach: `scalars` under one weight, after `spread`, and the weighted sum of
    the whole that is still wanted. `grid` is what they may lose in all, in folded columns, its potential that
    of the last table; None where nothing."""

    scalars: Scalars
    limit: float
    grid: Grid | None = None


def eliminated(part: Part, order: Order, limits: Limits | None = None) -> Labels:
    """The frontiers of a part for each choice of its entry and exit; labels beyond the limits are dropped as
    soon as they arise."""
    factors_in = {place: frozenset([place]) for place in range(len(part.factors))}
    tables = {place: labels_of(factor.variables, factor.costs) for place, factor in enumerate(part.factors)}
    losing = None
    if limits is not None and limits.grid is not None:
        losing = _Losing.of(part, limits.scalars, limits.grid)
    for step in order.steps:
        factors_in[step.output] = frozenset().union(*(factors_in[table] for table in step.inputs))
        inputs = [(tables.pop(table), factors_in[table]) for table in step.inputs]
        tables[step.output] = _done(step, inputs, limits, losing)
    found = tables[order.last]
    for end in (part.entry, part.exit):
        if end is not None and end not in found.variables:  # nothing there costs anything
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


@dataclass(slots=True, eq=False)
class _Losing:
    """What the steps of a part may lose: each of the first so many that come to many pairs an equal part.

    The excess of a label in a table is the least that any label of the part has which is made of it, so that
    parts in proportion to it add up to no more than the whole in proportion to that.
    """

    scalars: Scalars
    grid: Grid
    beyond: dict[int, Values]
    left: int = LOSSY_STEPS

    @staticmethod
    def of(part: Part, scalars: Scalars, grid: Grid) -> _Losing:
        """Of a part, under the weights of its scalars."""
        potential = grid.potential
        entry = 1 if part.entry is None else part.sizes[part.entry]
        beyond = scalars.beyond(unbordered(part, potential.reshape((entry, -1, 1))))
        return _Losing(scalars, grid, beyond)

    def grid_of(self, step: Step, weights: Values) -> Grid:
        """Of the labels of a step's table, whose columns weigh this much."""
        self.left -= 1
        axes = self.scalars.axes[step.output]
        beyond = self.beyond[step.output][..., 0].transpose(np.argsort(axes))
        return Grid(_unfolded(self.grid.base), _unfolded(self.grid.rate), weights, beyond.reshape(-1))


def _unfolded(loss: Values) -> Values:
    """A step's part of what may be lost, in the columns before they are folded: a peak is what is made again
    and a temporary beside it, half and half."""
    return np.asarray([*loss[:3], loss[3] / 2.0, loss[3] / 2.0]) / LOSSY_STEPS


def _done(
    step: Step, inputs: list[tuple[Labels, frozenset[int]]], limits: Limits | None, losing: _Losing | None
) -> Labels:
    """The table that a step makes, of tables and the factors in each; small tables are joined first."""
    waiting = sorted(inputs, key=lambda each: (len(each[0]), each[0].variables))
    nothing = (labels_of((), np.zeros((len(COLUMNS),))), frozenset[int]())
    waiting += [nothing] * (2 - len(waiting))
    while len(waiting) > 2:
        a, b = waiting[:2]
        both = (joined(a[0], b[0]), a[1] | b[1])
        waiting = sorted([both, *waiting[2:]], key=lambda each: (len(each[0]), each[0].variables))
    a, b = waiting
    if limits is None:
        return joined(a[0], b[0], without=step.variable)
    within = Within(
        _weights(limits, a[1]), _weights(limits, b[1]), _weights(limits, a[1] | b[1]),
        _outside(limits.scalars, step), limits.limit,
    )  # fmt: skip
    if losing is None or not losing.left or not _are_many(a[0], b[0], step.variable, within):
        return joined(a[0], b[0], without=step.variable, within=within)
    grid = losing.grid_of(step, within.weights)
    return joined(a[0], b[0], without=step.variable, within=within, grid=grid)


def _are_many(a: Labels, b: Labels, without: int | None, within: Within) -> bool:
    return len(a) * len(b) >= MANY and pairs_of(a, b, without=without, within=within) >= MANY


def _weights(limits: Limits, factors: frozenset[int]) -> Values:
    """What the columns of a table weigh: a peak is weighed at one factor, inside or outside."""
    weights = limits.scalars.weights[0].copy()
    if limits.scalars.peaked not in factors:
        weights[-1] = 0.0
    return np.asarray(weights)


def _outside(scalars: Scalars, step: Step) -> Values:
    """The least of all that is not in a step's table, its variables in ascending order."""
    axes = scalars.axes[step.output]
    return np.asarray(scalars.outside[step.output][..., 0].transpose(np.argsort(axes)))
