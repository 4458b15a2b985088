"""Operator graphs on PyTorch: runs a graph plan operator by operator."""

from shardwise.runtime.graphs.job import GraphTrainingJob
from shardwise.runtime.graphs.modules import check_computable, graph_module, graph_value, meta_graph_module

__all__ = [
    "GraphTrainingJob",
    "check_computable",
    "graph_module",
    "graph_value",
    "meta_graph_module",
]
