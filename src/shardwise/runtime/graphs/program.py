"""An operator graph as a sequence of steps, with repeated blocks unrolled: `program_of`, `GraphProgram`."""

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
"""What an operator computes beyond its kind: function, epsilon, scale."""


@dataclass(frozen=True)
class OperatorStep:
    """An operator of one repetition of a block; `parameters` are the names of its parameters in it.

    `label` is its name in profiles.
    """

    work: ShardedOperator
    parameters: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Section:
    """One repetition of a block.

    `specs` has the placements in which readers find the entry, the result, tensors with several readers, and
    skip tensors. `readers` counts the readers of each tensor in the block. `skip_outputs` are read by later
    sections, `skip_inputs` come from earlier ones. `label` is the section's name in profiles.
    """

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
        """The graph inputs that the block reads, by name."""
        made = {self.block.entry, *self.skip_inputs, *(op.name for op in self.block.operators)}
        reads = {operand.source for op in self.block.operators for operand in op.inputs}
        return frozenset(reads - made)


@dataclass(frozen=True)
class ParameterSpec:
    """How a parameter is stored, gathered and updated.

    `spec` has its shape in the graph and its stored placements. `used` are the placements that it is gathered
    to for all readers; None with one reader. `arrived` are the placements of its gradient after all readers:
    sharded along the axes that shard the parameter, and as the readers leave it along others.

    Along the axes `states_split`, optimizer states are sharded and each rank updates a share. `parts` are the
    placements of shares where readers use the parameter sharded along all these axes: the gradient of the
    share is then local. It is None where a share is a range of elements.
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
        """Names of parameters whose collectives are batched: those of a block; a shared one with its first
        block."""
        found: list[list[str]] = []
        known: set[str] = set()
        for section in self.sections:
            names = dict.fromkeys(name for step in section.steps for name in step.parameters)
            found.append([name for name in names if name not in known])
            known |= set(names)
        return [names for names in found if names]

    @property
    def data(self) -> Mapping[str, int]:
        """The graph inputs that are read, by name, with their number of readers."""
        found: Counter[str] = Counter()
        for section in self.sections:
            found.update({name: section.readers[name] for name in section.data})
        return found


def program_of(
    graph: OpGraph, layout: GraphLayout, grid: ProcessMesh, settings: Mapping[int, Settings] | None = None
) -> GraphProgram:
    """The program of `graph` under `layout` on `grid`.

    `settings` are those of operators by number, repetitions counted.
    """
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
    """The name of a parameter in repetition `count` of `repeat`.

    `layers.{2}.weight` becomes `layers.5.weight` in repetition 3. A name without such a number gets one
    appended.
    """
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
