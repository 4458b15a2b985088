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
