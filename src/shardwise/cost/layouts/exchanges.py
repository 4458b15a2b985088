"""What ranks tell each other inside an operator, for all of its layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.cost.layouts.choices import OperatorLayouts
from shardwise.cost.layouts.conversions import group_sizes
from shardwise.cost.layouts.forms import Values
from shardwise.cost.layouts.ground import CostContext
from shardwise.graph import CollectiveCall


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds (K) of exchanges forward and backward."""

    forward_s: Values
    backward_s: Values


def collective_times(context: CostContext, choices: OperatorLayouts) -> CollectiveTimes:
    """Exchanges of each layout; axes with the same rule do theirs as one group."""
    forward_s, backward_s = np.zeros(len(choices)), np.zeros(len(choices))
    rules_by_name = {rule.name: rule for rules in choices.rules for rule in rules if rule.collectives}
    for rule in rules_by_name.values():
        follows = np.array([[own.name == rule.name for own in rules] for rules in choices.rules])
        rows = np.flatnonzero(follows.any(axis=1))
        sizes = group_sizes(context.mesh, follows[rows])
        for call in rule.collectives:
            elements = call.copies * choices.extent(call.dims)[rows]
            nbytes = elements * (call.element_bytes or context.activation_bytes)
            once_s = _once_s(context, call, nbytes, sizes)
            forward_s[rows] += call.forward_calls * once_s
            backward_s[rows] += call.backward_calls * once_s
    return CollectiveTimes(forward_s, backward_s)


def _once_s(context: CostContext, call: CollectiveCall, nbytes: Values, sizes: tuple[Values, ...]) -> Values:
    if call.collective == "all_reduce":
        return np.asarray(context.fabric.all_reduce_s(nbytes, sizes))
    if call.collective == "all_gather":
        return np.asarray(context.fabric.all_gather_s(nbytes, sizes))
    if call.collective == "reduce_scatter":
        return np.asarray(context.fabric.reduce_scatter_s(nbytes, sizes))
    outermost = np.zeros(len(nbytes), dtype=np.int64)
    for tier, members in enumerate(sizes):
        outermost = np.where(members > 1, tier, outermost)
    return np.asarray(context.fabric.send_s(2.0 * nbytes, outermost))
