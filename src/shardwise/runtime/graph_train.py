"""What `train` trains under the plan of an operator graph, where nobody brings a module: the graph's own, on
samples of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.graph import OpGraph, OpNode
from shardwise.runtime.graphs import GraphModule, check_told, graph_module
from shardwise.runtime.initial import generator_of
from shardwise.runtime.weights import graph_weights_in

BATCHES = 4
"""So many batches are made, and met again and again: their targets are drawn, and can only be remembered."""


@dataclass(frozen=True, slots=True)
class GraphSamples:
    """Random batches of a graph, by seed and step."""

    graph: OpGraph
    seed: int

    def batch(self, step: int) -> dict[str, Tensor]:
        """The inputs of the graph by name, of step `step` (from 0)."""
        return synthetic_batch(self.graph, seed=self.seed, step=step)

    def content(self) -> None:
        """Nothing but the seed."""


def module_of_graph(graph: OpGraph, *, seed: int, weights: str | None) -> GraphModule:
    """The module of `graph` with the parameters in the folder `weights`, else by the seed. ConfigError where
    the graph does not tell what it computes."""
    check_told(graph)
    if weights is None:
        return graph_module(graph, seed=seed)
    return GraphModule(graph, graph_weights_in(weights, graph))


def synthetic_batch(graph: OpGraph, *, seed: int, step: int) -> dict[str, Tensor]:
    """Every input of `graph`: classes where an operator reads them as such, else normal numbers."""
    classes = classes_of(graph)
    found: dict[str, Tensor] = {}
    for name, shape in graph.inputs.items():
        random = generator_of(f"{name} {step % BATCHES}", seed)
        if name in classes:
            found[name] = torch.randint(classes[name], shape, generator=random)
        else:
            found[name] = torch.randn(shape, generator=random)
    return found


def classes_of(graph: OpGraph) -> Mapping[str, int]:
    """The inputs that are indices, and below which number."""
    found: dict[str, int] = {}
    for block in graph.blocks:
        for op in block.operators:
            for source, count in _indices(op):
                if source in graph.inputs:
                    found[source] = min(count, found.get(source, count))
    return found


def _indices(op: OpNode) -> list[tuple[str, int]]:
    if op.kind == "embedding":
        indices, table = op.inputs[0], op.parameters[0].dims
        (rows,) = (dim for dim in table if dim not in indices.dims and dim not in op.output)
        return [(indices.source, op.dims[rows])]
    if op.kind == "cross_entropy":
        logits, targets = op.inputs
        (classes,) = (dim for dim in logits.dims if dim not in targets.dims)
        return [(targets.source, op.dims[classes])]
    return []
