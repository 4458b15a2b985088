"""The algebra of Pareto sets: columns of objectives, with back-pointers; and the chains of choices that are
tracked."""

from shardwise.frontier.algebra import Frontier, frontier_of, product, union, union_all
from shardwise.frontier.knee import knee
from shardwise.frontier.network import (
    ADDITIVE,
    COLUMNS,
    Chain,
    Costs,
    Factor,
    FactorGraph,
    Segment,
    first_occurrences,
    shared_sizes,
)
from shardwise.frontier.reduce import non_dominated

__all__ = [
    "ADDITIVE",
    "COLUMNS",
    "Chain",
    "Costs",
    "Factor",
    "FactorGraph",
    "Frontier",
    "Segment",
    "first_occurrences",
    "frontier_of",
    "knee",
    "non_dominated",
    "product",
    "shared_sizes",
    "union",
    "union_all",
]
