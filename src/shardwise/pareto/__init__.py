"""Pareto frontiers with back-pointers (`Frontier`, `non_dominated`, `product`, `union`, `knee`), and the
chains of factor graphs (`Chain`, `Segment`, `FactorGraph`) that the Pareto search minimises."""

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
from shardwise.pareto.frontier import knee, non_dominated

__all__ = [
    "ADDITIVE",
    "COLUMNS",
    "Chain",
    "Costs",
    "Factor",
    "FactorGraph",
    "Segment",
    "first_occurrences",
    "knee",
    "non_dominated",
    "shared_sizes",
]
