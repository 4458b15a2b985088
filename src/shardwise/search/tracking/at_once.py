"""Frontiers of small chains by elimination alone: where little can be chosen, lines and looks take longer."""

from __future__ import annotations

from shardwise.frontier import Chain
from shardwise.search.tracking.labels import Allowance, TooManyLabels
from shardwise.search.tracking.links import link_labels
from shardwise.search.tracking.state import orders_of
from shardwise.search.tracking.walk import Walked, walked

FEW_COSTS = 1500
"""Costs of all variables of a chain, alone and together, from which on none is tried."""

PAIRS, LABELS, PAIRS_AT_ONCE = 1 << 18, 1 << 11, 1 << 14
"""Pairs of labels of all joins, and labels of a table, from which on a try is given up: a tenth of a second,
or a few."""


def at_once(chain: Chain) -> Walked | None:
    """The frontier of a chain, exactly; None where that would be too many labels."""
    parts = [part for link in chain for _, part in link.modes]
    if sum(factor.costs[..., 0].size for part in parts for factor in part.factors) > FEW_COSTS:
        return None
    allowance, orders = Allowance(PAIRS, LABELS, PAIRS_AT_ONCE), orders_of(chain)
    try:
        links = [link_labels(chain, orders, place, allowance=allowance) for place in range(len(chain))]
        return walked(chain, links, allowance=allowance)
    except TooManyLabels:
        return None
