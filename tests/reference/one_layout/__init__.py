"""Estimate of one layout of an operator graph, from its names alone.

Plain scalar code, written from docs/concepts/pareto-search.md to check `cost.layouts`, which estimates all
layouts at once. Both use the same equations, records and operator definitions, and share no other code.
"""

from tests.reference.one_layout.layout import Charge, LayoutEstimate, estimate_layout, estimate_stage
from tests.reference.one_layout.pipeline import PipelineEstimate, estimate_pipeline

__all__ = [
    "Charge",
    "LayoutEstimate",
    "PipelineEstimate",
    "estimate_layout",
    "estimate_pipeline",
    "estimate_stage",
]
