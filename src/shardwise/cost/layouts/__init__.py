"""Costs of all layouts of an operator graph on a mesh of devices, as a chain of factor graphs."""

from shardwise.cost.layouts.chain import (
    LayoutSpace,
    entry_shapes,
    layout_chain,
    relaxed_layouts,
    stage_layouts,
    transfer_elements,
)

__all__ = [
    "LayoutSpace",
    "entry_shapes",
    "layout_chain",
    "relaxed_layouts",
    "stage_layouts",
    "transfer_elements",
]
