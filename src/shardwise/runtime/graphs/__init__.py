"""Operator graphs on PyTorch: a graph plan carried out operator by operator."""

from shardwise.runtime.graphs.graph_job import GraphJob, laid_job
from shardwise.runtime.graphs.module import GraphModule, check_told, first_readers, graph_module
from shardwise.runtime.graphs.store import Held

__all__ = ["GraphJob", "GraphModule", "Held", "check_told", "first_readers", "graph_module", "laid_job"]
