"""What blocks and operators are called where repetitions are told apart: in traces, and beside them."""

from __future__ import annotations

from shardwise.graph.record import OpGraph


def block_labels(graph: OpGraph) -> tuple[str, ...]:
    """All blocks in order, repetitions counted: by name, of several repetitions with the number of each,
    `layers[3]`."""
    return tuple(
        block.name if block.repeat == 1 else f"{block.name}[{count}]"
        for block in graph.blocks
        for count in range(block.repeat)
    )


def operator_label(block_label: str, operator: str) -> str:
    """An operator of a repetition: `layers[3]/attend`."""
    return f"{block_label}/{operator}"
