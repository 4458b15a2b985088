"""One layout of an operator graph, priced from its names alone.

Plain scalar code written from docs/concepts/pareto-search.md, to hold prices of all layouts at once against:
it shares the equations, the records and what kinds of operators say with `cost.layouts`, and no code."""

from shardwise.cost.one_layout.layout import Charge, LayoutEstimate, estimate_layout, estimate_stage
from shardwise.cost.one_layout.pipeline import PipelineEstimate, estimate_pipeline

__all__ = [
    "Charge",
    "LayoutEstimate",
    "PipelineEstimate",
    "estimate_layout",
    "estimate_pipeline",
    "estimate_stage",
]
