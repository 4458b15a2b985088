"""The module of an operator graph: what its operators compute, on one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode
from shardwise.runtime.graphs.kernels_pointwise import element_function
from shardwise.runtime.graphs.program import repeated
from shardwise.runtime.initial import generator_of

NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm")

EMBEDDING_STD = 0.02
"""Standard deviation of the rows of tables (GPT-2's)."""


class GraphModule(nn.Module):
    """The parameters of `graph`, by the names that it gives them, repetitions counted."""

    def __init__(self, graph: OpGraph, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, value in values.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(last, nn.Parameter(value))


def graph_module(graph: OpGraph, *, seed: int = 0) -> GraphModule:
    """The module of `graph` with parameters that depend on the seed and on their names: weights normal, with
    the inverse root of what they sum over as deviation, norms one, biases zero."""
    values: dict[str, Tensor] = {}
    for name, (op, slot) in first_readers(graph).items():
        if name not in values:
            values[name] = _initial(name, op, slot, seed)
    return GraphModule(graph, values)


def check_computable(graph: OpGraph) -> None:
    """ConfigError by the name of the first operator of which `graph` does not say what it computes: it takes
    the module that the graph was captured from."""
    for block in graph.blocks:
        for op in block.operators:
            if op.kind == "elementwise":
                try:
                    element_function(op)
                except ConfigError as error:
                    raise error.within(key=f"graph.{block.name}") from None


def first_readers(graph: OpGraph) -> dict[str, tuple[OpNode, int]]:
    """Every parameter by its name, with its first reader and its place there."""
    found: dict[str, tuple[OpNode, int]] = {}
    for block in graph.blocks:
        for count in range(block.repeat):
            for op in block.operators:
                for slot, parameter in enumerate(op.parameters):
                    found.setdefault(repeated(parameter.name, count, block.repeat), (op, slot))
    return found


def is_weight(op: OpNode, slot: int) -> bool:
    """Whether a parameter is multiplied with what is read: neither a bias nor the scale of a norm."""
    if op.kind in NORMS or op.kind == "elementwise":
        return False
    return slot < (2 if op.kind in ("lstm", "gru", "lstm_cell", "gru_cell") else 1) or op.kind == "einsum"


def _initial(name: str, op: OpNode, slot: int, seed: int) -> Tensor:
    dims = op.parameters[slot].dims
    shape = op.shape(dims)
    if not is_weight(op, slot):
        is_scale = (op.kind in NORMS and slot == 0) or op.attributes.get("function") == "multiply"
        return torch.full(shape, 1.0 if is_scale else 0.0)
    std = EMBEDDING_STD
    if op.kind != "embedding":
        std = op.elements(tuple(dim for dim in dims if dim not in op.output)) ** -0.5
    return torch.randn(shape, generator=generator_of(name, seed)).mul_(std)
