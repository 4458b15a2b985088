"""Operator graphs on PyTorch: a graph plan carried out operator by operator."""

from shardwise.runtime.graphs.graph_job import GraphJob, laid_job
from shardwise.runtime.graphs.module import GraphModule, check_told, graph_module

__all__ = ["GraphJob", "GraphModule", "check_told", "graph_module", "laid_job"]
