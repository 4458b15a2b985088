"""The same network at another batch or sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import prod

from shardwise.errors import ConfigError
from shardwise.graph.record import OpGraph, OpNode
from shardwise.graph.sizes import CONSTANT, MAX_SIZE, SizeGrowth, scaled_size
from shardwise.inputs import short_repr

Ratio = tuple[Fraction, Fraction]


def scaled(graph: OpGraph, batch: int | None = None, seq_len: int | None = None) -> OpGraph:
    """`graph` at this batch and sequence length (None: its own).

    Every dim grows as `graph.growth` says of its name, graph inputs as their readers' dims, and an operator's
    own `flop` and `moved_bytes` as its iteration space. Raises ConfigError where the graph has no sequence
    length, or a dim would be no whole number.
    """
    if seq_len is not None and graph.seq_len is None:
        raise ConfigError(
            f"cannot change: graph {short_repr(graph.name)} has no sequence",
            key="seq_len",
            found=str(seq_len),
        )
    ratio = (
        Fraction(batch or graph.batch, graph.batch),
        Fraction(seq_len or graph.seq_len or 1, graph.seq_len or 1),
    )
    blocks = tuple(
        replace(block, operators=tuple(_scaled_node(node, graph.growth, ratio) for node in block.operators))
        for block in graph.blocks
    )
    return replace(
        graph,
        inputs={name: _scaled_input(graph, name, ratio) for name in graph.inputs},
        blocks=blocks,
        batch=batch or graph.batch,
        seq_len=seq_len or graph.seq_len,
    )


def input_growth(graph: OpGraph, name: str) -> tuple[SizeGrowth, ...]:
    """What each dim of a graph input grows with, as its readers' dims say."""
    for block in graph.blocks:
        for node in block.operators:
            for operand in node.inputs:
                if operand.source == name:
                    return tuple(graph.growth.get(dim, CONSTANT) for dim in operand.dims)
    return (CONSTANT,) * len(graph.inputs[name])


def _scaled_input(graph: OpGraph, name: str, ratio: Ratio) -> tuple[int, ...]:
    pairs = zip(graph.inputs[name], input_growth(graph, name), strict=True)
    return tuple(_whole(scaled_size(size, growth, ratio), short_repr(name)) for size, growth in pairs)


def _scaled_node(node: OpNode, growth: Mapping[str, SizeGrowth], ratio: Ratio) -> OpNode:
    dims = {
        dim: _whole(
            scaled_size(size, growth.get(dim, CONSTANT), ratio), f"{short_repr(node.name)}, dim {dim}"
        )
        for dim, size in node.dims.items()
    }
    factor = prod(dims.values()) / prod(node.dims.values())
    return replace(
        node,
        dims=dims,
        flop=None if node.flop is None else node.flop * factor,
        moved_bytes=None if node.moved_bytes is None else node.moved_bytes * factor,
    )


def _whole(size: Fraction, what: str) -> int:
    """`size` as a number; ConfigError where it is none that a dim can have."""
    if size.denominator == 1 and size <= MAX_SIZE:
        return int(size)
    raise ConfigError(
        f"gives {what} no size",
        key="batch",
        found=f"{float(size):g}",
        allowed=f"a batch and a sequence length that make it a whole number up to {MAX_SIZE:g}",
    )
