"""The algebra of Pareto sets: columns of objectives, with back-pointers; and the chains of choices that are
tracked."""

from shardwise.frontier.algebra import Frontier, frontier_of, product, union, union_all
from shardwise.frontier.knee import knee
from shardwise.frontier.network import COLUMNS, SUMMED, Chain, Costs, Factor, Link, Part, firsts, hub_sizes
from shardwise.frontier.reduce import reduce

__all__ = [
    "COLUMNS",
    "SUMMED",
    "Chain",
    "Costs",
    "Factor",
    "Frontier",
    "Link",
    "Part",
    "firsts",
    "frontier_of",
    "hub_sizes",
    "knee",
    "product",
    "reduce",
    "union",
    "union_all",
]
