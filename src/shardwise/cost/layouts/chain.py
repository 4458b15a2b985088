"""A graph on a mesh as a chain of choices, and solutions of the chain as layouts with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, Literal, Protocol

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.layouts.block import (
    ROLES,
    BlockContext,
    BlockGraphs,
    Role,
    SharedParameter,
    Variable,
    block_graphs,
)
from shardwise.cost.layouts.forms import Placements
from shardwise.cost.layouts.ground import CostContext, cost_context_of
from shardwise.cost.layouts.structure import Structure, structure_of
from shardwise.cost.training import Training
from shardwise.frontier import Chain, Segment
from shardwise.graph import BlockLayout, GraphLayout, OpGraph, skip_tensors_of, tensor_shapes


class Chosen(Protocol):
    """What one occurrence of a link chose: the place of its mode, and an option of each variable."""

    @property
    def mode(self) -> int: ...

    @property
    def choices(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class LayoutSpace:
    """All layouts of `graph` on `mesh`: a chain of choices, one link per block, and what its variables are.

    Where blocks share a parameter, to which place it is brought for all of its readers is a hub; so is where
    a tensor lies that a block lends to others.
    """

    graph: OpGraph
    mesh: Mesh
    chain: Chain
    variables: tuple[tuple[Variable, ...], ...]

    @property
    def layouts_per_operator(self) -> dict[str, int]:
        """How many layouts each operator has."""
        return {
            variable.name: len(variable.options)
            for variables in self.variables
            for variable in variables
            if variable.role == "rules"
        }

    def layout(self, solution: Sequence[Chosen]) -> GraphLayout:
        """The layout that a solution of the chain chose, repetitions one by one."""
        return self.layouts([solution])[0]

    def layouts(self, solutions: Sequence[Sequence[Chosen]]) -> list[GraphLayout]:
        """The same of many; blocks that chose alike are told once."""
        places = [place for place, link in enumerate(self.chain) for _ in range(link.repeat)]
        known: dict[tuple[int, int, tuple[int, ...]], BlockLayout] = {}
        found = []
        for solution in solutions:
            stored: dict[str, Placements] = {}
            blocks = []
            for place, chosen in zip(places, solution, strict=True):
                key = (place, chosen.mode, chosen.choices)
                if key not in known:
                    known[key] = self._block(place, chosen)
                block = known[key]
                stored |= {
                    name: placements for name, placements in block.stored.items() if name in block.used
                }
                if block.used:
                    shared = {name: stored[name] for name in block.used}
                    block = replace(block, stored={**block.stored, **shared})
                blocks.append(block)
            found.append(GraphLayout(ranks=self.mesh.ranks, blocks=tuple(blocks)))
        return found

    def _block(self, place: int, chosen: Chosen) -> BlockLayout:
        """What one block chose; a parameter that several read is stored where the first of them is."""
        found: dict[Role, dict[str, Any]] = {role: {} for role in ROLES}
        for variable, choice in zip(self.variables[place], chosen.choices, strict=True):
            found[variable.role][variable.name] = variable.options[choice]
        is_saved = self.chain[place].modes[chosen.mode][0] == "kept"
        mode: Literal["kept", "recomputed"] = "kept" if is_saved else "recomputed"
        return BlockLayout(name=self.graph.blocks[place].name, mode=mode, **found)


def layout_chain(graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh) -> LayoutSpace:
    """Every way to lay `graph` out on `mesh`, priced (docs/concepts/pareto-search.md). ConfigError where the
    devices lack the dtype."""
    context = cost_context_of(cluster, mesh, training)
    structures = structures_of(graph, training)
    fixed_s, fixed_bytes = fixed_costs(context)
    graphs: list[BlockGraphs] = []
    for place, structure in enumerate(structures):
        is_last = place == len(structures) - 1
        block_context = BlockContext(
            next_saves_entry=next_saves_entry(structures, place),
            shared=shared_parameters(graph, place),
            fixed_s=fixed_s if is_last else 0.0,
            fixed_bytes=fixed_bytes if is_last else 0.0,
        )
        graphs.append(block_graphs(context, structure, block_context))
    return LayoutSpace(
        graph=graph,
        mesh=mesh,
        chain=tuple(
            Segment(block.name, own.modes, block.repeat)
            for block, own in zip(graph.blocks, graphs, strict=True)
        ),
        variables=tuple(own.variables for own in graphs),
    )


def shared_across(graph: OpGraph) -> list[str]:
    """The parameters that several blocks read."""
    homes: dict[str, set[str]] = {}
    for block in graph.blocks:
        for op in block.operators:
            for parameter in op.parameters:
                homes.setdefault(parameter.name, set()).add(block.name)
    return [name for name, blocks in homes.items() if len(blocks) > 1]


def shared_parameters(graph: OpGraph, place: int) -> dict[str, SharedParameter]:
    """The parameters of a block that have several readers, there or elsewhere."""
    readers: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for home, block in enumerate(graph.blocks):
        for at, op in enumerate(block.operators):
            for slot, parameter in enumerate(op.parameters):
                readers.setdefault(parameter.name, []).append((home, (at, slot)))
    found = {}
    for name, places in readers.items():
        if len(places) > 1:
            home, first = places[0]
            is_across = len({home for home, _ in places}) > 1
            found[name] = SharedParameter(len(places), first if home == place else None, is_across)
    return found


def structures_of(graph: OpGraph, training: Training) -> list[Structure]:
    """The structure of each block, one after the other."""
    structures: list[Structure] = []
    skips, shapes = skip_tensors_of(graph), tensor_shapes(graph)
    needs_gradient = is_saved = False
    there: dict[str, bool] = {}
    for place, block in enumerate(graph.blocks):
        # Repetitions are alike: the first one's entry needs a gradient, and room, where the others' do.
        trains = block.repeat > 1 and any(op.parameters for op in block.operators)
        structure = structure_of(
            block,
            graph.inputs,
            shapes=shapes[place],
            entry_needs_gradient=needs_gradient or trains,
            skip_inputs={name: there[name] for name in skips.skip_inputs[place]},
            skip_outputs=skips.skip_outputs[place],
            entry_is_saved_elsewhere=is_saved and block.repeat == 1,
            has_next=place < len(graph.blocks) - 1,
            stops_early=training.profile.recompute_stops_early,
        )
        structures.append(structure)
        needs_gradient = structure.result_needs_gradient
        is_saved = block.operators[-1].name in structure.skip_outputs
        there |= structure.skip_outputs
    return structures


def fixed_costs(context: CostContext) -> tuple[float, float]:
    """Seconds and bytes that no layout changes: the host's part of a step, joining the gradients' norm; the
    driver's context, and communicators of the world and of each axis.

    The bytes are beside the allocator's, which holds more than it gives out: so much less of them counts.
    """
    efficiency = context.machine.efficiency
    devices = context.counts.stages * context.mesh.devices
    # A stage and its neighbours are groups of their own.
    axes = sum(size > 1 for size in (*context.ranks, context.counts.stages))
    fixed_bytes = efficiency.context_bytes + (1.0 + axes) * efficiency.communicator_bytes
    join_s = 2.0 * log2(devices) * context.fabric.alphas_s[-1]
    resident_bytes = fixed_bytes / (1.0 + efficiency.fragmentation_ratio) + context.counts.buffer_bytes
    return context.profile.host_step_s + join_s, resident_bytes


def next_saves_entry(structures: Sequence[Structure], place: int) -> bool:
    """Whether what comes after a block keeps the block's result: its own repetition, or the next block."""
    if structures[place].block.repeat > 1:
        return structures[place].saves_entry
    return place + 1 < len(structures) and structures[place + 1].saves_entry
