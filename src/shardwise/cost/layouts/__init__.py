"""Operator graphs on a mesh of devices: what every way to lay them out costs, as a chain of choices."""

from shardwise.cost.layouts.chain import LaidOut, layout_chain
from shardwise.cost.layouts.stage import border_shapes, handed_elements, open_layouts, stage_layouts

__all__ = ["LaidOut", "border_shapes", "handed_elements", "layout_chain", "open_layouts", "stage_layouts"]
