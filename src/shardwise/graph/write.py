"""Graphs as text: what is written is read as an equal graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwise.graph.file import GRAPH_SCHEMA, VERSION
from shardwise.graph.record import Block, OpGraph, OpNode
from shardwise.graph.scale import input_growth
from shardwise.graph.sizes import CONSTANT, size_text
from shardwise.inputs import dumps_flow_yaml, dumps_yaml

_WIDTH = 118
"""Where lines of operators are broken."""


def graph_text(graph: OpGraph) -> str:
    """`graph` as a YAML file, each operator on one or few lines. `load_graph` reads it as an equal graph."""
    shared = _shared_sizes(graph)
    text = dumps_yaml(_head(graph, shared)) + "blocks:\n"
    return text + "".join(
        f"{line}\n" for block in graph.blocks for line in _block_lines(graph, block, shared)
    )


def _head(graph: OpGraph, shared: dict[str, int]) -> dict[str, object]:
    """All but the blocks, as plain values."""
    document: dict[str, object] = {"schema": GRAPH_SCHEMA, "version": VERSION, "name": graph.name}
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


def _block_lines(graph: OpGraph, block: Block, shared: dict[str, int]) -> Iterator[str]:
    yield f"- name: {dumps_flow_yaml(block.name)}"
    if block.entry is not None:
        yield f"  entry: {dumps_flow_yaml(block.entry)}"
    if block.repeat > 1:
        yield f"  repeat: {block.repeat}"
    yield "  operators:"
    for node in block.operators:
        pairs = [
            f"{key}: {dumps_flow_yaml(value)}" for key, value in _operator_entry(graph, node, shared).items()
        ]
        yield from _wrapped(pairs)


def _wrapped(pairs: list[str]) -> Iterator[str]:
    """A flow mapping as an item of a list, broken between its keys where it is too long for a line."""
    line = "  - {"
    for index, pair in enumerate(pairs):
        if len(line) + len(pair) + 1 > _WIDTH and index:
            yield line.rstrip()
            line = "     "
        line += pair + ("}" if index == len(pairs) - 1 else ", ")
    yield line


def _operator_entry(graph: OpGraph, node: OpNode, shared: dict[str, int]) -> dict[str, object]:
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
