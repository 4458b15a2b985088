"""Tracking frontiers through one part: elimination of its variables, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.frontier import COLUMNS, Part
from shardwise.search.tracking.labels import Labels, Values, Within, joined, labels_of
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.steps import Order, Step


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """How far the labels of a part reach: `scalars` under one weight, after `spread`, and the weighted sum of
    the whole that is still wanted."""

    scalars: Scalars
    limit: float


def eliminated(part: Part, order: Order, limits: Limits | None = None) -> Labels:
    """The frontiers of a part for each choice of its entry and exit; labels beyond the limits are dropped as
    soon as they arise."""
    factors_in = {place: frozenset([place]) for place in range(len(part.factors))}
    tables = {place: labels_of(factor.variables, factor.costs) for place, factor in enumerate(part.factors)}
    for step in order.steps:
        factors_in[step.output] = frozenset().union(*(factors_in[table] for table in step.inputs))
        inputs = [(tables.pop(table), factors_in[table]) for table in step.inputs]
        tables[step.output] = _done(step, inputs, limits)
    found = tables[order.last]
    for end in (part.entry, part.exit):
        if end is not None and end not in found.variables:  # nothing there costs anything
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


def _done(step: Step, inputs: list[tuple[Labels, frozenset[int]]], limits: Limits | None) -> Labels:
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
    return joined(a[0], b[0], without=step.variable, within=within)


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
