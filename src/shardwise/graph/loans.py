"""Tensors that blocks read of blocks further back: skip connections, and what an encoder hands to every layer
of a decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardwise.graph.record import Block, OpGraph


@dataclass(frozen=True, slots=True)
class SkipTensors:
    """By the place of a block among the graph's: names of the tensors that it lends to blocks behind it, its
    entry or what its operators make, and of those that it borrows from blocks before it."""

    skip_outputs: tuple[tuple[str, ...], ...]
    skip_inputs: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that are lent."""
        return tuple(name for names in self.skip_outputs for name in names)


def possible_skip_outputs(block: Block) -> tuple[str, ...]:
    """The tensors that later blocks may read of `block`: of one that is there once all but graph inputs."""
    if block.repeat > 1:
        return ()
    entry = () if block.entry is None else (block.entry,)
    return (*entry, *(op.name for op in block.operators))


def skip_tensors_of(graph: OpGraph) -> SkipTensors:
    """Who lends what to whom; a name that several blocks have for their entries is none that others read."""
    entries = Counter(block.entry for block in graph.blocks)
    taken: list[set[str]] = [set() for _ in graph.blocks]
    skip_inputs: list[tuple[str, ...]] = []
    homes: dict[str, int] = {}
    for place, block in enumerate(graph.blocks):
        own = {block.entry, *(op.name for op in block.operators)}
        reads = dict.fromkeys(operand.source for op in block.operators for operand in op.inputs)
        skip_inputs.append(tuple(name for name in reads if name in homes and name not in own))
        for name in skip_inputs[-1]:
            taken[homes[name]].add(name)
        homes |= {name: place for name in possible_skip_outputs(block) if entries[name] < 2}
    skip_outputs = (
        tuple(name for name in possible_skip_outputs(block) if name in names)
        for block, names in zip(graph.blocks, taken, strict=True)
    )
    return SkipTensors(tuple(skip_outputs), tuple(skip_inputs))


def blocks_joined_by_skips(graph: OpGraph) -> frozenset[int]:
    """The blocks, repetitions counted, that no cut may lie before: one that lends a tensor is in front of
    them, and one that borrows it is among them or behind."""
    skips = skip_tensors_of(graph)
    ends = tuple(accumulate(block.repeat for block in graph.blocks))
    joined: set[int] = set()
    for home, names in enumerate(skips.skip_outputs):
        for name in names:
            last = max(place for place, skip_inputs in enumerate(skips.skip_inputs) if name in skip_inputs)
            joined.update(range(ends[home], ends[last]))
    return frozenset(joined)


def tensor_shapes(graph: OpGraph) -> tuple[Mapping[str, tuple[int, ...]], ...]:
    """By the place of a block the shapes of all activations that it has: its entry, what it borrows and what
    its operators make."""
    skips = skip_tensors_of(graph)
    found: list[dict[str, tuple[int, ...]]] = []
    there: dict[str, tuple[int, ...]] = {}
    for block, skip_outputs, skip_inputs in zip(
        graph.blocks, skips.skip_outputs, skips.skip_inputs, strict=True
    ):
        shapes = {name: there[name] for name in skip_inputs}
        if block.entry is not None:
            shapes[block.entry] = found[-1][graph.blocks[len(found) - 1].operators[-1].name]
        shapes |= {op.name: op.shape(op.output) for op in block.operators}
        there |= {name: shapes[name] for name in skip_outputs}
        found.append(shapes)
    return tuple(found)
