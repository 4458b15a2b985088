"""The algebra of Pareto sets: columns of objectives, with back-pointers; and the chains of choices that are
tracked."""

from shardwise.pareto.factor_graph import (
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
from shardwise.pareto.frontier import Frontier, frontier_of, knee, non_dominated, product, union, union_all

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
