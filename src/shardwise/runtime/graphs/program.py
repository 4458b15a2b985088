"""A graph as a list of steps: its repetitions written out, each with its own parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.graph import STATES_SPLIT, Block, BlockLayout, GraphLayout, OpGraph, OpNode, Placement
from shardwise.runtime.graphs.bring import Lie
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.work import Work

Settings = Mapping[str, Any]
"""What the kind of an operator does not say of it."""


@dataclass(frozen=True)
class Step:
    """An operator of one repetition of a block; `parameters` are the names that its parameters have there."""

    work: Work
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One repetition of a block. `lies` says of tensors with several readers, of the entry and of the result
    where they lie for their readers; `readers` how many readers a tensor has in the block."""

    block: Block
    layout: BlockLayout
    steps: tuple[Step, ...]
    lies: Mapping[str, Lie]
    readers: Mapping[str, int]

    @property
    def result(self) -> str:
        return self.block.operators[-1].name


@dataclass(frozen=True)
class Stored:
    """A parameter: its name, its shape in the graph, where it waits, and where it is brought to for all of
    its readers (None where it has one)."""

    name: str
    lie: Lie
    states_split: tuple[int, ...]
    used: Lie | None


@dataclass(frozen=True)
class Program:
    """All sections in order, and all parameters by name."""

    sections: tuple[Section, ...]
    parameters: Mapping[str, Stored]
    data: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def program_of(
    graph: OpGraph, layout: GraphLayout, grid: Grid, settings: Mapping[int, Settings] | None = None
) -> Program:
    """`graph` laid on `grid`; `settings` of operators by their number, repetitions counted."""
    own = settings or {}
    repetitions = [(block, count) for block in graph.blocks for count in range(block.repeat)]
    readers = Counter(
        parameter.name for block in graph.blocks for op in block.operators for parameter in op.parameters
    )
    sections: list[Section] = []
    parameters: dict[str, Stored] = {}
    number = 0
    for (block, count), lies in zip(repetitions, layout.blocks, strict=True):
        steps = []
        for op in block.operators:
            work = Work(op, lies.rules[op.name], grid, own.get(number, {}))
            names = tuple(repeated(parameter.name, count, block.repeat) for parameter in op.parameters)
            steps.append(Step(work, names))
            number += 1
            for name, parameter in zip(names, op.parameters, strict=True):
                shape = op.shape(parameter.dims)
                used = lies.used[parameter.name] if readers[parameter.name] > 1 else None
                parameters.setdefault(name, _stored(name, shape, lies.stored[parameter.name], used))
        sections.append(_section(block, lies, tuple(steps)))
    return Program(tuple(sections), parameters, dict(graph.inputs))


def repeated(name: str, count: int, repeat: int) -> str:
    """The name of a parameter in the repetition with number `count` of `repeat`: `layers.{2}.weight` is
    `layers.5.weight` in the one with number 3. Without a number of its own it gets one behind it."""
    own = re.sub(r"\{(\d+)\}", lambda found: str(int(found[1]) + count), name)
    return f"{name}.{count}" if own == name and repeat > 1 else own


def _stored(
    name: str, shape: tuple[int, ...], placements: Sequence[Placement], used: Sequence[Placement] | None
) -> Stored:
    split = tuple(axis for axis, placement in enumerate(placements) if placement == STATES_SPLIT)
    return Stored(name, Lie(shape, placements), split, None if used is None else Lie(shape, used))


def _section(block: Block, layout: BlockLayout, steps: tuple[Step, ...]) -> Section:
    shapes: dict[str, tuple[int, ...]] = {op.name: op.shape(op.output) for op in block.operators}
    readers: Counter[str] = Counter()
    for op in block.operators:
        for operand in op.inputs:
            readers[operand.source] += 1
            if operand.source == block.entry:
                shapes[operand.source] = op.shape(operand.dims)
    lies = {name: Lie(shapes[name], placements) for name, placements in layout.tensors.items()}
    return Section(block, layout, steps, lies, dict(readers))


def operators_of(graph: OpGraph) -> list[OpNode]:
    """All operators in order, repetitions counted."""
    return [op for block in graph.blocks for _ in range(block.repeat) for op in block.operators]
