"""Tracking frontiers through one part: elimination of its variables, and conditioning where the tables would
grow too large."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.frontier import COLUMNS, Part
from shardwise.search.tracking.labels import Indices, Keep, Labels, Values, joined, labels_of
from shardwise.search.tracking.lines import may_matter
from shardwise.search.tracking.scalars import Scalars
from shardwise.search.tracking.steps import Order, Step


def eliminated(
    part: Part, order: Order, scalars: Scalars | None = None, corner_sums: Values | None = None
) -> Labels:
    """The frontiers of a part for each choice of its entry and exit.

    With `scalars` (after `spread`) and what their weights make of the corners, labels that lead below no
    corner are dropped as soon as they arise.
    """
    factors_in: dict[int, frozenset[int]] = {place: frozenset([place]) for place in range(len(part.factors))}
    tables = {place: labels_of(factor.variables, factor.costs) for place, factor in enumerate(part.factors)}
    for step in order.steps:
        keep = None
        if scalars is not None and corner_sums is not None:
            factors_in[step.output] = frozenset().union(*(factors_in[table] for table in step.inputs))
            keep = _keep(part, step, scalars, corner_sums, factors_in[step.output])
        tables[step.output] = _done(part, step, [tables.pop(table) for table in step.inputs], keep)
    found = tables[order.last]
    for end in (part.entry, part.exit):
        if end is not None and end not in found.variables:  # nothing there costs anything
            found = joined(found, labels_of((end,), np.zeros((part.sizes[end], len(COLUMNS)))))
    return found


def _done(part: Part, step: Step, inputs: list[Labels], keep: Keep | None) -> Labels:
    """The table that a step makes; small tables are joined first."""
    waiting = sorted(inputs, key=lambda table: (len(table), table.variables))
    if not waiting:
        waiting = [labels_of((), np.zeros((len(COLUMNS),)))]
    while len(waiting) > 2:
        a, b = waiting[:2]
        waiting = sorted([joined(a, b), *waiting[2:]], key=lambda table: (len(table), table.variables))
    if len(waiting) == 1:
        waiting.append(labels_of((), np.zeros((len(COLUMNS),))))
    return joined(*waiting, without=step.variable, keep=keep)


def _keep(part: Part, step: Step, scalars: Scalars, corner_sums: Values, factors: frozenset[int]) -> Keep:
    """Which labels of a step's table may lead below a corner: their own weighted sum and the least of all
    that is outside; a peak is weighed once, inside or outside."""
    axes = scalars.axes[step.output]
    outside = scalars.outside[step.output]
    outside = np.moveaxis(outside, range(len(axes)), np.argsort(np.argsort(axes)))
    flat = outside.reshape(prod(part.sizes[variable] for variable in axes), outside.shape[-1])
    weights = scalars.weights.copy()
    if scalars.peaked not in factors:
        weights[:, -1] = 0.0

    def keep(cells: Indices, points: Values) -> npt.NDArray[np.bool_]:
        return may_matter(points @ weights.T + flat[cells], corner_sums)

    return keep
