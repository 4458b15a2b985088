"""What is trained, operator by operator: graphs of typed operators and the ways to lay them on a mesh."""

from shardwise.graph.placement import (
    PARTIAL,
    WHOLE,
    WHOLE_SUMMED,
    Placement,
    placement_text,
    placements_of,
    shard,
)
from shardwise.graph.record import Block, Kept, Operand, OpGraph, OpNode, Parameter, Rule, Work

__all__ = [
    "PARTIAL",
    "WHOLE",
    "WHOLE_SUMMED",
    "Block",
    "Kept",
    "OpGraph",
    "OpNode",
    "Operand",
    "Parameter",
    "Placement",
    "Rule",
    "Work",
    "placement_text",
    "placements_of",
    "shard",
]
