"""Costs of all layouts of an operator graph on a mesh of devices, as a chain of factor graphs."""

from shardwise.cost.layouts.chain import (
    LayoutSpace,
    entry_shapes,
    layout_chain,
    relaxed_layouts,
    stage_layouts,
)
from shardwise.cost.layouts.one import Charge, LayoutEstimate, estimate_layout, estimate_stage

__all__ = [
    "Charge",
    "LayoutEstimate",
    "LayoutSpace",
    "entry_shapes",
    "estimate_layout",
    "estimate_stage",
    "layout_chain",
    "relaxed_layouts",
    "stage_layouts",
]
