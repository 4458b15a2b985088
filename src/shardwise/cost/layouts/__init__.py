"""Operator graphs on a mesh of devices: what every way to lay them out costs, as a chain of choices."""

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
