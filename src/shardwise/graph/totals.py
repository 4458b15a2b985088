"""What a graph amounts to: its parameters, and the floating-point operations of a pass and of a step."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from shardwise.graph.operator import work_of
from shardwise.graph.record import OpGraph, OpNode
from shardwise.graph.work import KernelWork


def parameter_count(graph: OpGraph) -> int:
    """Trained elements: a shared parameter once, one in a repeated block once per repetition."""
    counts = {
        parameter.name: node.elements(parameter.dims) * block.repeat
        for block in graph.blocks
        for node in block.operators
        for parameter in node.parameters
    }
    return sum(counts.values())


def forward_flop(graph: OpGraph) -> float:
    """Products and attention of one forward pass over the whole batch, a multiplication and an addition as
    two; causal attention counts half. An operator's own `flop` counts instead."""
    return sum(block.repeat * sum(map(_forward, block.operators)) for block in graph.blocks)


def step_flop(graph: OpGraph) -> float:
    """Of one forward and backward pass: the backward pass does the same again for each operand of a product
    that has a gradient, which graph inputs have not."""
    return sum(
        block.repeat * sum(_forward(node) * (1 + _gradients(node, graph.inputs)) for node in block.operators)
        for block in graph.blocks
    )


def _forward(node: OpNode) -> float:
    return sum(_flop(node, work) for work in work_of(node)) if node.flop is None else node.flop


def _flop(node: OpNode, work: KernelWork) -> float:
    """Of one kernel, all steps of its serial dims together."""
    batch, m, n, k, v, steps = (
        prod(node.shape(dims)) for dims in (work.batch, work.m, work.n, work.k, work.v, work.serial)
    )
    if work.kind == "matmul":
        return 2.0 * steps * batch * m * n * k
    if work.kind == "attention":
        keys = n / 2 if work.causal else n
        return 2.0 * batch * m * min(keys, work.window or keys) * (k + v)
    return 0.0


def _gradients(node: OpNode, data: Collection[str]) -> int:
    """How many of the two operands of a product have gradients; parameters beside the weight are added."""
    inputs = sum(operand.source not in data for operand in node.inputs)
    return min(1, inputs) + 1 if node.parameters else min(2, inputs)
