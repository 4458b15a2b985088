"""Operator graphs on a mesh of devices: what every way to lay them out costs, as a chain of choices."""

from shardwise.cost.layouts.chain import LaidOut, layout_chain

__all__ = ["LaidOut", "layout_chain"]
