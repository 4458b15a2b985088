"""Operator graphs on PyTorch: runs a graph plan operator by operator."""

from shardwise.runtime.graphs.job import GraphTrainingJob, graph_training_job
from shardwise.runtime.graphs.modules import GraphModule, check_computable, first_readers, graph_module
from shardwise.runtime.graphs.parameters import ShardedParameter

__all__ = [
    "GraphModule",
    "GraphTrainingJob",
    "ShardedParameter",
    "check_computable",
    "first_readers",
    "graph_module",
    "graph_training_job",
]
