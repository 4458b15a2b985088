"""What is trained, operator by operator: graphs of typed operators and the ways to lay them on a mesh."""

from shardwise.graph.check import check_graph
from shardwise.graph.file import parse_graph
from shardwise.graph.load import graph_names, load_graph, shipped_graphs
from shardwise.graph.placement import (
    PARTIAL,
    STATES_SPLIT,
    WHOLE,
    WHOLE_SUMMED,
    Placement,
    placement_text,
    placements_of,
    shard,
)
from shardwise.graph.record import Block, Kept, Operand, OpGraph, OpNode, Parameter, Rule, Work
from shardwise.graph.scale import scaled
from shardwise.graph.sizes import Growth
from shardwise.graph.write import graph_text

__all__ = [
    "PARTIAL",
    "STATES_SPLIT",
    "WHOLE",
    "WHOLE_SUMMED",
    "Block",
    "Growth",
    "Kept",
    "OpGraph",
    "OpNode",
    "Operand",
    "Parameter",
    "Placement",
    "Rule",
    "Work",
    "check_graph",
    "graph_names",
    "graph_text",
    "load_graph",
    "parse_graph",
    "placement_text",
    "placements_of",
    "scaled",
    "shard",
    "shipped_graphs",
]
