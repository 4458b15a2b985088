"""Frontiers of small chains by elimination alone: where little can be chosen, lines and looks take longer."""

from __future__ import annotations

from shardwise.frontier import Chain
from shardwise.search.tracking.labels import Allowance, TooManyLabels
from shardwise.search.tracking.links import segment_labels
from shardwise.search.tracking.state import orders_of
from shardwise.search.tracking.walk import ChainFrontier, chain_frontier

SMALL_CHAIN_COSTS = 1500
"""Costs of all variables of a chain, alone and together, from which on none is tried."""

SMALL_CHAIN_PAIRS, SMALL_CHAIN_LABELS, SMALL_CHAIN_PAIRS_AT_ONCE = 1 << 18, 1 << 11, 1 << 14
"""Pairs of labels of all joins, and labels of a table, from which on a try is given up: a tenth of a second,
or a few."""


def eliminate_small_chain(chain: Chain) -> ChainFrontier | None:
    """The frontier of a chain, exactly; None where that would be too many labels."""
    parts = [part for segment in chain for _, part in segment.modes]
    if sum(factor.costs[..., 0].size for part in parts for factor in part.factors) > SMALL_CHAIN_COSTS:
        return None
    allowance, orders = (
        Allowance(SMALL_CHAIN_PAIRS, SMALL_CHAIN_LABELS, SMALL_CHAIN_PAIRS_AT_ONCE),
        orders_of(chain),
    )
    try:
        segments = [segment_labels(chain, orders, place, allowance=allowance) for place in range(len(chain))]
        return chain_frontier(chain, segments, allowance=allowance)
    except TooManyLabels:
        return None
