"""What `train` trains under the plan of an operator graph, where nobody brings a module: the graph's own."""

from __future__ import annotations

from shardwise.graph import OpGraph
from shardwise.runtime.graphs import GraphModule, check_computable, graph_module
from shardwise.runtime.weights import graph_weights_in


def module_of_graph(graph: OpGraph, *, seed: int, weights: str | None) -> GraphModule:
    """The module of `graph` with the parameters in the folder `weights`, else by the seed. ConfigError where
    the graph does not tell what it computes."""
    check_computable(graph)
    if weights is None:
        return graph_module(graph, seed=seed)
    return GraphModule(graph, graph_weights_in(weights, graph))
