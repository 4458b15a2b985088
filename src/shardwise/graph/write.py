"""Graphs as text: what is written is read as an equal graph."""

from __future__ import annotations

from collections import Counter

from shardwise.graph.file import SCHEMA, VERSION
from shardwise.graph.record import Block, OpGraph, OpNode
from shardwise.graph.scale import input_growth
from shardwise.graph.sizes import CONSTANT, size_text
from shardwise.inputs import written_yaml


def graph_text(graph: OpGraph) -> str:
    """`graph` as a YAML file. `load_graph` reads it as an equal graph, at its batch and sequence length."""
    return written_yaml(graph_document(graph))


def graph_document(graph: OpGraph) -> dict[str, object]:
    """`graph` as plain values, with the keys of a graph file."""
    shared = _shared_sizes(graph)
    document: dict[str, object] = {"schema": SCHEMA, "version": VERSION, "name": graph.name}
    if graph.source:
        document["source"] = graph.source
    document["batch"] = graph.batch
    if graph.seq_len is not None:
        document["seq_len"] = graph.seq_len
    document["sizes"] = {dim: _size(graph, dim, size) for dim, size in shared.items()}
    document["inputs"] = {
        name: [
            size_text(size, growth, graph.batch, graph.seq_len)
            for size, growth in zip(shape, input_growth(graph, name), strict=True)
        ]
        for name, shape in graph.inputs.items()
    }
    document["blocks"] = [_block(graph, block, shared) for block in graph.blocks]
    return document


def _shared_sizes(graph: OpGraph) -> dict[str, int]:
    """For each name of a dim the size that most operators give it, the first of those that are level."""
    counts: dict[str, Counter[int]] = {}
    for block in graph.blocks:
        for node in block.operators:
            for dim, size in node.dims.items():
                counts.setdefault(dim, Counter())[size] += 1
    return {dim: sizes.most_common(1)[0][0] for dim, sizes in counts.items()}


def _size(graph: OpGraph, dim: str, size: int) -> int | str:
    return size_text(size, graph.growth.get(dim, CONSTANT), graph.batch, graph.seq_len)


def _block(graph: OpGraph, block: Block, shared: dict[str, int]) -> dict[str, object]:
    document: dict[str, object] = {"name": block.name}
    if block.entry is not None:
        document["entry"] = block.entry
    if block.repeat > 1:
        document["repeat"] = block.repeat
    return document | {"operators": [_operator(graph, node, shared) for node in block.operators]}


def _operator(graph: OpGraph, node: OpNode, shared: dict[str, int]) -> dict[str, object]:
    """One operator; keys that would say nothing are left out."""
    tensors = {dim for dims in node.tensors for dim in dims}
    own = {
        dim: _size(graph, dim, size)
        for dim, size in node.dims.items()
        if size != shared[dim] or dim not in tensors
    }
    document: dict[str, object] = {"name": node.name, "kind": node.kind}
    if own:
        document["dims"] = own
    if node.inputs:
        document["inputs"] = [{"from": o.source, "dims": list(o.dims)} for o in node.inputs]
    if node.parameters:
        document["parameters"] = [{"name": p.name, "dims": list(p.dims)} for p in node.parameters]
    document["output"] = list(node.output)
    if node.attributes:
        document["attributes"] = dict(node.attributes)
    if node.whole:
        document["whole"] = list(node.whole)
    for key, value in (("flop", node.flop), ("moved_bytes", node.moved_bytes)):
        if value is not None:
            document[key] = value
    return document
