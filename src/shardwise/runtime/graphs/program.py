"""A graph as a list of steps: its repetitions written out, each with its own parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.graph import (
    REPLICATE_SHARD_STATES,
    Block,
    BlockLayout,
    GraphLayout,
    OpGraph,
    OpNode,
    Placement,
    block_labels,
    operator_label,
    skip_tensors_of,
    tensor_shapes,
)
from shardwise.runtime.graphs.placements import MeshPlacements, ProcessMesh
from shardwise.runtime.graphs.redistribute import TensorSpec
from shardwise.runtime.graphs.sharded_operator import ShardedOperator

Settings = Mapping[str, Any]
"""What the kind of an operator does not say of it."""


@dataclass(frozen=True)
class OperatorStep:
    """An operator of one repetition of a block; `parameters` are the names that its parameters have there.
    Profiles call it by its `label`."""

    work: ShardedOperator
    parameters: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Section:
    """One repetition of a block. `lies` says of tensors with several readers, of the entry, of the result and
    of what blocks share where they lie for their readers; `readers` how many readers a tensor has in the
    block. It lends what is `skip_outputs` to sections behind, and borrows what is `skip_inputs`. Profiles
    call it by its `label`."""

    block: Block
    layout: BlockLayout
    steps: tuple[OperatorStep, ...]
    specs: Mapping[str, TensorSpec]
    readers: Mapping[str, int]
    skip_outputs: tuple[str, ...]
    skip_inputs: tuple[str, ...]
    label: str

    @property
    def result(self) -> str:
        return self.block.operators[-1].name

    @property
    def data(self) -> frozenset[str]:
        """What it reads that neither it nor a block before it makes: graph inputs, by name."""
        made = {self.block.entry, *self.skip_inputs, *(op.name for op in self.block.operators)}
        reads = {operand.source for op in self.block.operators for operand in op.inputs}
        return frozenset(reads - made)


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter: its name, its shape in the graph, where it waits, where it is brought to for all of its
    readers (None where it has one), and what ranks have of its gradient when all of them are done: along axes
    that split it their parts, along others what its readers leave.

    Along the axes `states_split` each rank updates a share of what all of them have: the part in `parts`
    where readers use it in parts along all of these, so that the gradient of the share is there when it
    comes; None where a share is a run of elements.
    """

    name: str
    spec: TensorSpec
    states_split: tuple[int, ...]
    used: TensorSpec | None
    arrived: MeshPlacements
    parts: MeshPlacements | None


@dataclass(frozen=True)
class GraphProgram:
    """All sections in order, and all parameters by name."""

    sections: tuple[Section, ...]
    parameters: Mapping[str, ParameterSpec]

    def part(self, first: int, end: int) -> GraphProgram:
        """The sections from `first` to before `end`, and their parameters."""
        sections = self.sections[first:end]
        names = {name for section in sections for step in section.steps for name in step.parameters}
        return GraphProgram(sections, {name: own for name, own in self.parameters.items() if name in names})

    @property
    def parameter_groups(self) -> Sequence[Sequence[str]]:
        """Names of parameters that travel together: those of a block, or where several blocks read one, of
        the first of these."""
        found: list[list[str]] = []
        known: set[str] = set()
        for section in self.sections:
            names = dict.fromkeys(name for step in section.steps for name in step.parameters)
            found.append([name for name in names if name not in known])
            known |= set(names)
        return [names for names in found if names]

    @property
    def data(self) -> Mapping[str, int]:
        """The graph inputs that are read, by name, and how often."""
        found: Counter[str] = Counter()
        for section in self.sections:
            found.update({name: section.readers[name] for name in section.data})
        return found


def program_of(
    graph: OpGraph, layout: GraphLayout, grid: ProcessMesh, settings: Mapping[int, Settings] | None = None
) -> GraphProgram:
    """`graph` laid on `grid`; `settings` of operators by their number, repetitions counted."""
    own = settings or {}
    skips, shapes = skip_tensors_of(graph), tensor_shapes(graph)
    repetitions = [
        (place, block, count) for place, block in enumerate(graph.blocks) for count in range(block.repeat)
    ]
    readers = Counter(
        parameter.name for block in graph.blocks for op in block.operators for parameter in op.parameters
    )
    sections: list[Section] = []
    parameters: dict[str, ParameterSpec] = {}
    number = 0
    labels = block_labels(graph)
    for (place, block, count), block_layout, label in zip(repetitions, layout.blocks, labels, strict=True):
        steps = []
        for op in block.operators:
            work = ShardedOperator(op, block_layout.rules[op.name], grid, own.get(number, {}))
            names = tuple(repeated(parameter.name, count, block.repeat) for parameter in op.parameters)
            steps.append(OperatorStep(work, names, operator_label(label, op.name)))
            number += 1
            for name, parameter, read in zip(names, op.parameters, work.parameters, strict=True):
                shape, stored = op.shape(parameter.dims), block_layout.stored[parameter.name]
                shared = (
                    TensorSpec(shape, block_layout.used[parameter.name])
                    if readers[parameter.name] > 1
                    else None
                )
                parameters.setdefault(name, _stored(name, shape, stored, shared, read, grid))
        sections.append(
            Section(
                block=block,
                layout=block_layout,
                steps=tuple(steps),
                specs={
                    name: TensorSpec(shapes[place][name], placed)
                    for name, placed in block_layout.tensors.items()
                },
                readers=Counter(operand.source for op in block.operators for operand in op.inputs),
                skip_outputs=skips.skip_outputs[place],
                skip_inputs=skips.skip_inputs[place],
                label=label,
            )
        )
    return GraphProgram(tuple(sections), parameters)


def repeated(name: str, count: int, repeat: int) -> str:
    """The name of a parameter in the repetition with number `count` of `repeat`: `layers.{2}.weight` is
    `layers.5.weight` in the one with number 3. Without a number of its own it gets one behind it."""
    own = re.sub(r"\{(\d+)\}", lambda found: str(int(found[1]) + count), name)
    return f"{name}.{count}" if own == name and repeat > 1 else own


def _stored(
    name: str,
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    shared: TensorSpec | None,
    read: TensorSpec,
    grid: ProcessMesh,
) -> ParameterSpec:
    split = tuple(
        axis
        for axis, each in enumerate(placements)
        if each == REPLICATE_SHARD_STATES and grid.counts[axis] > 1
    )
    spec = TensorSpec(shape, placements)
    used = (shared or read).gradient
    apart = tuple(axis for axis, placement in enumerate(spec.value.by_axis) if isinstance(placement, int))
    arrived = used.with_axes_of(apart, spec.value)
    dims = {used.by_axis[axis] for axis in split}
    is_apart = all(isinstance(dim, int) for dim in dims) and dims.isdisjoint(spec.value.by_axis)
    parts = spec.value.with_axes_of(split, used) if split and is_apart else None
    return ParameterSpec(name, spec, split, shared, arrived, parts)


def operators_of(graph: OpGraph) -> list[OpNode]:
    """All operators in order, repetitions counted."""
    return [op for block in graph.blocks for _ in range(block.repeat) for op in block.operators]
