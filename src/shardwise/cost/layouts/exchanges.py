"""What ranks tell each other inside an operator, for all of its layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.cost.layouts.choices import Choices
from shardwise.cost.layouts.conversions import group_sizes
from shardwise.cost.layouts.forms import Values
from shardwise.cost.layouts.ground import Ground
from shardwise.graph import Exchange


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Seconds (K) of exchanges forward and backward."""

    forward_s: Values
    backward_s: Values


def exchanged(ground: Ground, choices: Choices) -> Exchanged:
    """Exchanges of each layout; axes with the same rule do theirs as one group."""
    forward_s, backward_s = np.zeros(len(choices)), np.zeros(len(choices))
    told = {rule.name: rule for rules in choices.rules for rule in rules if rule.exchanges}
    for rule in told.values():
        follows = np.array([[own.name == rule.name for own in rules] for rules in choices.rules])
        rows = np.flatnonzero(follows.any(axis=1))
        sizes = group_sizes(ground.mesh, follows[rows])
        for exchange in rule.exchanges:
            elements = exchange.copies * choices.extent(exchange.dims)[rows]
            nbytes = elements * (exchange.element_bytes or ground.activation_bytes)
            once_s = _once_s(ground, exchange, nbytes, sizes)
            forward_s[rows] += exchange.forward_calls * once_s
            backward_s[rows] += exchange.backward_calls * once_s
    return Exchanged(forward_s, backward_s)


def _once_s(ground: Ground, exchange: Exchange, nbytes: Values, sizes: tuple[Values, ...]) -> Values:
    if exchange.collective == "all_reduce":
        return np.asarray(ground.fabric.all_reduce_s(nbytes, sizes))
    if exchange.collective == "all_gather":
        return np.asarray(ground.fabric.pass_s(nbytes, sizes))
    if exchange.collective == "reduce_scatter":
        return np.asarray(ground.fabric.scatter_s(nbytes, sizes))
    outermost = np.zeros(len(nbytes), dtype=np.int64)
    for tier, members in enumerate(sizes):
        outermost = np.where(members > 1, tier, outermost)
    return np.asarray(ground.fabric.neighbour_s(2.0 * nbytes, outermost))
